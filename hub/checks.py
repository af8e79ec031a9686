"""Check what must hold for a checkpoint that is published or was fetched.

The files that belong to it are there, its weights are whole and consistent, its code is known, its tokenizer fits, and
it holds no secrets.
"""

import re
from pathlib import Path

import torch
from huggingface_hub import constants, get_token
from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import (
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from common.checkpoint_io import (
    check_finite,
    check_index,
    check_no_adapter,
    check_shapes,
    load_config,
    load_config_dict,
    load_generation_config,
    load_tokenizer,
)
from common.command_io import UserError, printable, read_json, refusing
from common.foreign_code import refuse_foreign_code
from hub.remote_code import check_remote_code


# What Transformers reads beside weights and code.
LOADED_NAMES = {
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}
READ_BY_PEOPLE = {"LICENSE", "LICENSE.txt", "NOTICE", "README.md", "curves.png"}
EVAL_RESULTS = ".eval_results"  # the Hub's folder of results, one YAML file for each source
FOLDERS = {EVAL_RESULTS: "*.yaml", CHAT_TEMPLATE_DIR: "*.jinja"}
PICKLE_SUFFIXES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}
MAX_HEADER = 100_000_000  # bytes, the format's own limit

SECRETS = {
    "a Hugging Face token": rb"hf_[A-Za-z0-9]{30,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an AWS key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": rb"\b(?:gh[opsur]_[A-Za-z0-9]{36}|github_pat_\w{22,})",
    "a GitLab token": rb"\bglpat-[\w-]{20}",
    "a Google key": rb"\bAIza[\w-]{35}",
    "a Slack token": rb"\bxox[abeoprs]-[\w-]{10,}",
    "an OpenAI or Anthropic key": rb"\bsk-[\w-]{32,}",
}


def checkpoint_files(directory: Path) -> tuple[list[str], list[str]]:
    """Return the names in `directory` that make up the checkpoint, and those that do not (folders end in "/").

    The checkpoint consists of the weights that a load reads, the Python files that the config's `auto_map` leads to,
    what Transformers and people read beside them, and the files of `FOLDERS`. Raise `UserError` if `directory` is not
    a saved model, or holds a pickle, which could run any code when it is loaded.
    """
    if not (directory / CONFIG_NAME).is_file():
        raise UserError(f"{directory} holds no {CONFIG_NAME}: expected a saved model directory.")
    entries = sorted(directory.iterdir())
    refuse_pickles(directory, [path.name for path in entries])
    belongs = LOADED_NAMES | READ_BY_PEOPLE | _code_files(directory) | weight_files(directory)
    names = [path.name for path in entries if path.is_file() and path.name in belongs]
    inner = [path for folder, pattern in FOLDERS.items() for path in sorted((directory / folder).glob(pattern))]
    folders = {path.parent.name for path in inner}
    others = [path.name + "/" * path.is_dir() for path in entries if path.name not in {*names, *folders}]
    return names + [f"{path.parent.name}/{path.name}" for path in inner], others


def refuse_pickles(source: str | Path, names: list[str]) -> None:
    """Raise `UserError` if one of the file names is that of a pickle."""
    if pickles := [printable(name) for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES]:
        raise UserError(
            f"{source} holds {', '.join(pickles)}: pickles are refused, a checkpoint is safetensors only. Remove or "
            "convert them."
        )


def _code_files(directory: Path) -> set[str]:
    """Return the names of the modules in the config's `auto_map` and of all siblings that they import.

    Raise `UserError` for code that would not work from the Hub.
    """
    if problems := check_remote_code(directory):
        raise UserError(f"{directory} holds code that breaks once it is published: {' '.join(problems)}")
    auto_map = load_config_dict(directory).get("auto_map", {})
    modules = {directory / f"{reference.split('.')[0]}.py" for reference in auto_map.values()}
    helpers = {Path(helper) for module in modules for helper in get_relative_import_files(module)}
    return {path.name for path in modules | helpers}


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Return the file of each tensor by the index of sharded weights, or `None` if there is one file.

    Raise `UserError`.
    """
    single, index = ((directory / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
    if single and index:
        raise UserError(
            f"{directory} holds {SAFE_WEIGHTS_NAME} and {SAFE_WEIGHTS_INDEX_NAME}: a load reads the first and ignores "
            "the other. Remove the older."
        )
    if not single and not index:
        raise UserError(f"{directory} holds no weights: expected {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}.")
    if single:
        return None
    check_index(str(directory))
    weight_map = read_json(directory / SAFE_WEIGHTS_INDEX_NAME)["weight_map"]
    if folders := sorted(file for file in set(weight_map.values()) if Path(file).name != file):
        raise UserError(f"{SAFE_WEIGHTS_INDEX_NAME} of {directory} names {folders[0]!r}: expected files beside it.")
    return weight_map


def weight_files(directory: Path) -> set[str]:
    """Return the names of the safetensors that a load reads, and of their index, or raise `UserError`."""
    weight_map = _weight_map(directory)
    return {SAFE_WEIGHTS_NAME} if weight_map is None else {SAFE_WEIGHTS_INDEX_NAME, *weight_map.values()}


def check_checkpoint(directory: Path, trust_code: bool) -> None:
    """Check all that can be checked of a checkpoint without running its code.

    The code must be this package's byte for byte unless `trust_code`. Raise `UserError`.
    """
    refuse_foreign_code(directory, trust_code)
    check_no_adapter(directory)
    config = load_config(directory)
    if load_generation_config(directory) is None:
        raise UserError(f"{directory} holds no {GENERATION_CONFIG_NAME}: save the model's generation config there.")
    load_tokenizer(directory, config.vocab_size)
    _check_weights(directory, config.tie_word_embeddings)
    check_shapes(directory, config)


def _check_weights(directory: Path, tied: bool) -> None:
    """Refuse weights that cannot be read, are not finite, or are not what their index says.

    Tied embeddings must be equal where both are saved, because a load would keep them apart without an error. Raise
    `UserError`.
    """
    weight_map, found, size, embeddings = _weight_map(directory), {}, 0, {}
    files = {SAFE_WEIGHTS_NAME} if weight_map is None else set(weight_map.values())
    for file in sorted(files):
        print(f"Checking {printable(file)}", flush=True)
        if not (directory / file).is_file():
            raise UserError(f"{directory} lacks {printable(file)}, which {SAFE_WEIGHTS_INDEX_NAME} names.")
        whole = refusing(f"{directory / file} is no whole safetensors file", SafetensorError)
        with whole, safe_open(directory / file, "pt") as tensors:
            metadata = tensors.metadata() or {}
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                check_finite([(name, tensor)], directory / file)
                found[name], size = file, size + tensor.nbytes
                if name in ("lm_head.weight", "model.embed_tokens.weight"):
                    embeddings[name] = tensor
        if metadata.get("format") != "pt":
            raise UserError(
                f"{directory / file} has format={metadata.get('format')!r} in its metadata; expected 'pt': save the "
                "model again."
            )
    if tied and len(embeddings) == 2 and not torch.equal(*embeddings.values()):
        raise UserError(
            f"{directory} ties its embeddings (tie_word_embeddings), and lm_head.weight differs from "
            "model.embed_tokens.weight: set tie_word_embeddings to false, or save the model again."
        )
    if weight_map is not None:
        if wrong := sorted(name for name, _ in weight_map.items() ^ found.items()):
            raise UserError(
                f"{SAFE_WEIGHTS_INDEX_NAME} of {directory} and its files disagree on {wrong[0]}: it should be in "
                f"{weight_map.get(wrong[0])}, and is in {found.get(wrong[0])}. Save the model again."
            )
        stated = read_json(directory / SAFE_WEIGHTS_INDEX_NAME)["metadata"].get("total_size", size)
        if stated != size:
            raise UserError(
                f"{SAFE_WEIGHTS_INDEX_NAME} of {directory} states {stated} bytes, its files hold {size}: save the "
                "model again."
            )


def check_links(directory: Path, names: list[str]) -> None:
    """Refuse a link that leads out of `directory`, because its target may not be meant for publication.

    The Hub's own cache is made of links, and a link into it is allowed. Raise `UserError`.
    """
    cache = Path(constants.HF_HUB_CACHE).resolve()
    for name in names:
        target = (directory / name).resolve()
        if target != directory.resolve() / name and not target.is_relative_to(cache):
            raise UserError(
                f"{directory / name} is a link to {target}: put the file itself there, or remove the link."
            )


def check_secrets(directory: Path, names: list[str]) -> None:
    """Refuse a file that holds the token in use, or what looks like a token or a private key.

    The error says where without repeating it. Of weights only the header is searched. Raise `UserError`.
    """
    patterns = dict(SECRETS)
    if token := get_token():
        patterns["the Hugging Face token in use"] = re.escape(token.encode())
    for name in names:
        with open(directory / name, "rb") as file:
            is_weights = name.endswith(".safetensors")
            text = file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER)) if is_weights else file.read()
        for what, pattern in patterns.items():
            if match := re.search(pattern, text):
                line = text.count(b"\n", 0, match.start()) + 1
                raise UserError(
                    f"{directory / name}, line {line}, holds what looks like {what}: remove it, and revoke it if "
                    "anybody else has seen the file."
                )

"""Check what must hold for a checkpoint that is published or was fetched.

The files that belong to it are there, its weights are whole and consistent, its code is known, its tokenizer fits, and
it holds no secrets.
"""

import re
from collections import Counter
from pathlib import Path
from unicodedata import normalize

from huggingface_hub import constants, get_token
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import (
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from common.checkpoint_io import (
    load_config,
    load_config_dict,
    load_generation_config,
    load_model,
    load_tokenizer,
    weight_files,
)
from common.command_io import UserError
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
    "a Hugging Face token": rb"(?:hf|api_org)_[A-Za-z0-9]{30,}|hf_(?:oauth|jwt)_[\w.-]{30,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY",  # PGP writes "BLOCK" behind it
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
    belongs = LOADED_NAMES | READ_BY_PEOPLE | _code_files(directory) | _weight_names(directory)
    names = [path.name for path in entries if path.is_file() and path.name in belongs]
    inner = [path for folder, pattern in FOLDERS.items() for path in sorted((directory / folder).glob(pattern))]
    folders = {path.parent.name for path in inner}
    others = [path.name + "/" * path.is_dir() for path in entries if path.name not in {*names, *folders}]
    return names + [f"{path.parent.name}/{path.name}" for path in inner], others


def refuse_pickles(source: str | Path, names: list[str]) -> None:
    """Raise `UserError` if one of the file names is that of a pickle."""
    if pickles := [name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES]:
        raise UserError(
            f"{source} holds {', '.join(pickles)}: pickles are refused, a checkpoint is safetensors only. Remove or "
            "convert them."
        )


def refuse_names(source: str, names: list[str]) -> None:
    """Raise `UserError` if a fetched name would be git's own, show as another, or take another's place on a disk."""
    folded = Counter(normalize("NFC", name).casefold() for name in names)
    for name in names:
        own = normalize("NFC", name).casefold()
        if ".git" in own.split("/") or not name.isprintable() or folded[own] > 1:
            raise UserError(
                f"{source} holds {name}: expected names that are not git's own, have no hidden characters, "
                "and differ in more than case. Do not use it before you know who put this there."
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


def _weight_names(directory: Path) -> set[str]:
    """Return the names of the safetensors that a load reads, and of their index, or raise `UserError`."""
    names = {Path(file).name for file in weight_files(directory)}
    return names if SAFE_WEIGHTS_NAME in names else {SAFE_WEIGHTS_INDEX_NAME, *names}


def check_checkpoint(directory: Path, trust_code: bool) -> None:
    """Check all that can be checked of a checkpoint without running its code.

    The code must be this package's byte for byte unless `trust_code`. Raise `UserError`.
    """
    refuse_foreign_code(directory, trust_code)
    config = load_config(directory)
    if load_generation_config(directory) is None:
        raise UserError(f"{directory} holds no {GENERATION_CONFIG_NAME}: save the model's generation config there.")
    load_tokenizer(directory, config.vocab_size)
    load_model(directory, config=config)


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

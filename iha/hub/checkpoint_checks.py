"""Check what must hold for a checkpoint that is published or was fetched.

The files that belong to it are there, its weights are whole and consistent, its code is known, and its tokenizer fits.
"""

import os
from fnmatch import fnmatchcase
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import (
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    FEATURE_EXTRACTOR_NAME,
    GENERATION_CONFIG_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    VIDEO_PROCESSOR_NAME,
)

from iha.checkpoints import (
    check_no_adapter,
    load_config,
    load_config_dict,
    load_generation_config,
    load_model,
    load_tokenizer,
    vocabulary_of,
    weight_files,
)
from iha.errors import UserError, refusing
from iha.foreign_code import CUSTOM_GENERATE, references, refuse_foreign_code
from iha.sources import Source, find_source


# Files that Transformers reads besides weights and code.
LOADED_NAMES = {
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
    FEATURE_EXTRACTOR_NAME,
}
# Files of tokenizers, as Transformers' classes name them. Other files that begin like these may be private.
TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer.[0-9]*.json",  # for a version of Transformers and later ones
    "tokenizer_config.json",
    "tokenizer.model*",
    "tokenizer.tiktoken",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "vocab-src.json",
    "vocab-tgt.json",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
)
READ_BY_PEOPLE = {"LICENSE", "LICENSE.txt", "NOTICE", "README.md", "curves.png"}
EVAL_RESULTS = ".eval_results"  # the Hub's folder of results, one YAML file for each source
FOLDERS = {EVAL_RESULTS: "*.yaml", CHAT_TEMPLATE_DIR: "*.jinja"}
# The folders of a repository that Transformers or the Hub reads. `pull` fetches `custom_generate` to reject it.
READ_FOLDERS = {*FOLDERS, str(Path(CUSTOM_GENERATE).parent)}
# Pickles that a Trainer writes next to a model. No load reads them.
TRAINER_STATE = {"optimizer.pt", "rng_state.pth", "scaler.pt", "scheduler.pt", "training_args.bin"}
PICKLE_SUFFIXES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}


def checkpoint_files(source: str | os.PathLike) -> tuple[list[str], list[str]]:
    """Return the names of a directory that make up the checkpoint, and those that do not (folders end in "/").

    The checkpoint consists of the weights that a load reads, the Python files that the config's `auto_map` leads to,
    what Transformers and people read besides them, and the files of `FOLDERS`. Raise `UserError` if `source` is not a
    saved model, holds an adapter, or holds a pickle other than a Trainer's, which could run any code when it is
    loaded.
    """
    source = find_source(source)
    directory = Path(source.location)
    if not (directory / CONFIG_NAME).is_file():
        raise UserError(f"{directory} holds no {CONFIG_NAME}: expected a saved model directory.")
    check_no_adapter(source)
    entries = sorted(directory.iterdir())
    refuse_pickles(directory, [path.name for path in entries])
    belongs = LOADED_NAMES | READ_BY_PEOPLE | _code_files(source) | _weight_names(source)
    belongs |= {path.name for path in entries if any(fnmatchcase(path.name, name) for name in TOKENIZER_PATTERNS)}
    known = [path for path in entries if path.name in belongs]
    at_root = [path for path in known if path.is_file()]
    inner = [path for folder, pattern in FOLDERS.items() for path in sorted((directory / folder).glob(pattern))]
    _refuse_outside(directory, at_root + inner)
    taken = {path.name for path in at_root} | {path.parent.name for path in inner}
    others = [f"{path.name}/" if path.is_dir() else path.name for path in entries if path.name not in taken]
    return [str(path.relative_to(directory)) for path in at_root + inner], others


def _refuse_outside(directory: Path, files: list[Path]) -> None:
    """Raise `UserError` for a link to a file outside of `directory`, which would be published under its name.

    The snapshots of the Hub's cache are links to its folder "blobs".
    """
    whole = directory.resolve()
    inside = [whole]
    if whole.parent.name == "snapshots":
        inside.append(whole.parent.parent / "blobs")
    for file in files:
        if not any(file.resolve().is_relative_to(folder) for folder in inside):
            raise UserError(f"{file} is a link to a file outside of {directory}: put the file itself there.")


def refuse_pickles(source: str | Path, names: list[str]) -> None:
    """Raise `UserError` if one of the file names is that of a pickle that a load might read."""
    names = [name for name in names if name not in TRAINER_STATE]
    if pickles := [name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES]:
        raise UserError(
            f"{source} holds {', '.join(pickles)}: pickles are rejected, a checkpoint is safetensors only. Remove or "
            "convert them."
        )


def _code_files(source: Source) -> set[str]:
    """Return the names of the modules in the config's `auto_map` and of all siblings that they import.

    Raise `UserError` if one is missing.
    """
    entries = load_config_dict(source)
    directory = Path(source.location)
    own = [reference for reference in references({"auto_map": entries.get("auto_map", {})}) if "--" not in reference]
    modules = {directory / f"{reference.rpartition('.')[0]}.py" for reference in own}
    with refusing(f"The code of {directory} is incomplete", OSError):
        helpers = {Path(helper) for module in modules for helper in get_relative_import_files(module)}
    return {path.name for path in modules | helpers}


def _weight_names(source: Source) -> set[str]:
    """Return the names of the safetensors that a load reads, and of their index, or raise `UserError`."""
    names = {Path(file).name for file in weight_files(source)}
    return names if SAFE_WEIGHTS_NAME in names else {SAFE_WEIGHTS_INDEX_NAME, *names}


def check_checkpoint(source: str | os.PathLike, trust_code: bool) -> None:
    """Check all that can be checked of the checkpoint in the directory `source` without running its code.

    The code must be this package's byte for byte unless `trust_code`. Raise `UserError`.
    """
    source = find_source(source)
    refuse_foreign_code(Path(source.location), trust_code)
    config = load_config(source)
    if load_generation_config(source) is None:
        raise UserError(f"{source} holds no {GENERATION_CONFIG_NAME}: save the model's generation config there.")
    load_tokenizer(source, vocabulary_of(config))
    load_model(source, config=config)


def loading_code(repo_id: str, revision: str) -> str:
    """Return Python code that loads a checkpoint at a commit."""
    pinned = f'"{repo_id}", revision="{revision}", trust_remote_code=True'
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({pinned})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({pinned})"
    )

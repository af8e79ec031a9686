"""Say which files belong to a checkpoint, and check what must hold for one that is published or was fetched."""

from fnmatch import fnmatchcase
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CHAT_TEMPLATE_DIR, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from iha.checkpoints import (
    load_config,
    load_generation_config,
    load_tokenizer,
    vocabulary_of,
    weight_files,
)
from iha.errors import UserError, refusing
from iha.foreign_code import named_modules, read_configs, refuse_foreign_code
from iha.processes import load_in_clean_process
from iha.sources import Source, find_source


# What Transformers reads besides weights and code. Other files that begin like a tokenizer's may be private.
READ_BY_LOADS = (
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    f"{CHAT_TEMPLATE_DIR}/*.jinja",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.[0-9]*.json",  # for a version of Transformers and later ones
    "tokenizer_config.json",
    "tokenizer.model*",
    "tokenizer.tiktoken",
    "merges.txt",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "vocab-src.json",
    "vocab-tgt.json",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
)
READ_BY_PEOPLE = ("LICENSE", "LICENSE.txt", "NOTICE", "README.md", "curves.png", ".eval_results/*.yaml")


def checkpoint_files(source: Source) -> tuple[list[str], list[str]]:
    """Return the names of a directory that make up the checkpoint, and those that do not (folders end in "/").

    The checkpoint consists of the weights that a load reads, the Python files that an `auto_map` leads to, and
    what Transformers and people read besides them. Raise `UserError` if `source` is not a saved model.
    """
    directory = Path(source.location)
    belongs = (*_code_files(directory), *_weight_names(source), *READ_BY_LOADS, *READ_BY_PEOPLE)
    files = [path for path in (*directory.iterdir(), *directory.glob("*/*")) if path.is_file()]
    names = sorted(path.relative_to(directory).as_posix() for path in files)
    taken = [name for name in names if any(fnmatchcase(name, pattern) for pattern in belongs)]
    roots = {name.partition("/")[0] for name in taken}
    others = sorted(path for path in directory.iterdir() if path.name not in roots)
    return taken, [f"{path.name}/" if path.is_dir() else path.name for path in others]


def _code_files(directory: Path) -> set[str]:
    """Return the names of the modules that an `auto_map` leads to, and of all siblings that they import.

    Raise `UserError` if one is missing.
    """
    modules = {directory / name for name in named_modules(read_configs(directory))}
    with refusing(f"The code of {directory} is incomplete", OSError):
        helpers = {Path(helper) for module in modules for helper in get_relative_import_files(module)}
    return {path.name for path in modules | helpers}


def _weight_names(source: Source) -> set[str]:
    """Return the names of the safetensors that a load reads, and of their index, or raise `UserError`."""
    names = {Path(file).name for file in weight_files(source)}
    if not names or not all(name.endswith(".safetensors") for name in names):
        raise UserError(f"{source} holds no {SAFE_WEIGHTS_NAME}: expected weights in safetensors.")
    return names if SAFE_WEIGHTS_NAME in names else {SAFE_WEIGHTS_INDEX_NAME, *names}


def check_checkpoint(directory: Path, name: str, trust_code: bool) -> dict:
    """Check the checkpoint in a directory, which errors call `name`, and load it in a clean process.

    Code runs last, and only this package's, byte for byte, unless `trust_code`. Return what `load_in_clean_process`
    does. Raise `UserError`.
    """
    directory = directory.resolve()  # as the clean process names it in its errors
    try:
        source = find_source(directory)
        refuse_foreign_code(directory, trust_code)
        config = load_config(source)
        if load_generation_config(source) is None:
            raise UserError(f"{name} holds no {GENERATION_CONFIG_NAME}: save the model's generation config there.")
        load_tokenizer(source, vocabulary_of(config))
        print(f"Loading {name} in a clean process", flush=True)
        return load_in_clean_process(directory)
    except UserError as error:
        # Many name files in the directory, which may be a temporary one that the user does not know.
        raise UserError(str(error).replace(str(directory), name)) from error


def loading_code(repo_id: str, revision: str) -> str:
    """Return Python code that loads a checkpoint at a commit."""
    pinned = f'"{repo_id}", revision="{revision}", trust_remote_code=True'
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({pinned})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({pinned})"
    )

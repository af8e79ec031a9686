"""Find a stranger's code in a checkpoint, and reject it.

A checkpoint's code runs only if it is this package's, byte for byte, or if the user says so. docs/CHECKPOINTS.md says
what each command runs, and when.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from iha.errors import UserError
from iha.files import read_json
from iha.sources import Source
from modeling_iha.modeling_interleaved import MODEL_TYPE
from modeling_iha.package import imported_code, shipped_code


CUSTOM_GENERATE = "custom_generate/generate.py"  # Transformers puts it in the place of `generate`


def refuse_foreign_code(directory: Path, trust_code: bool) -> None:
    """Reject, by name, code that is not this package's and that a load of `directory` would run.

    The load is one with `trust_remote_code=True`. Raise `UserError` unless `trust_code`.
    """
    if trust_code:
        return
    found = ", ".join(foreign_code(directory))
    if found:
        advice = "save the model again with this package, or read the code and give --trust-code"
        raise UserError(f"{found} of {directory} differs from this package's code, which a load runs: {advice}.")


def note_foreign_code(source: Source) -> None:
    """Name on stderr the code of a directory that is not this package's and is not run.

    This is for commands that load weights only into the classes of Transformers and of this package. Raise
    `UserError`.
    """
    found = ", ".join(foreign_code(source.path)) if source.path and source.gguf_file is None else ""
    if found:
        print(f"Not run, because it is not this package's: {found} of {source}", file=sys.stderr)


def foreign_code(directory: Path) -> list[str]:
    """Return the names of the code that a load of `directory` would run and that this package does not ship.

    The load is one with `trust_remote_code=True`, and the comparison is byte for byte. It covers the files that an
    `auto_map` of the config, the tokenizer or a processor leads to, the files of this package's names that those
    import, `custom_generate`, and code of other repositories. Raise `UserError`.
    """
    configs = read_configs(directory)
    known = code_of_this_package(configs.get(CONFIG_NAME, {}))
    # Our files import only files of ours, so a load reaches no others.
    reached = named_modules(configs) | {name for name in known if (directory / name).is_file()}
    files = [directory / name for name in sorted(reached)]
    found = [file.name for file in files if not file.is_file() or file.read_bytes() != known.get(file.name)]
    if (directory / CUSTOM_GENERATE).exists():
        found.append(CUSTOM_GENERATE)
    for name, entries in configs.items():
        found += [f"{entry} in {name}" for entry in code_elsewhere(entries)]
        found += [f"{reference} in {name}" for reference in _references(entries) if "--" in reference]
    return found


def code_of_this_package(config: dict) -> dict[str, bytes]:
    """Return the code that this package ships with a checkpoint of this config.json, by file."""
    if config.get("model_type") == MODEL_TYPE:
        return imported_code("modeling_interleaved.py")
    kinds = config.get("attention_kinds", [])
    return shipped_code(kinds if isinstance(kinds, list) else [kinds])


def code_elsewhere(entries: dict) -> list[str]:
    """Return the entries of a config.json that lead to code or to a config outside of the checkpoint.

    Transformers fetches a kernel from the Hub and runs it, whatever `trust_remote_code` says, and it reads
    `configuration_files` in the config's place.
    """
    cores = [(key, value) for key, value in _entries(entries) if "attn_implementation" in key]
    kernels = [(key, value) for key, value in cores if "/" in str(value)]
    return [f"{key} {value!r}" for key, value in kernels] + [key for key in entries if key == "configuration_files"]


def read_configs(directory: Path) -> dict[str, Any]:
    """Return the contents of the files of a directory that may name code, by file. Raise `UserError`."""
    return {path.name: read_json(path) for path in sorted(directory.glob("*config.json"))}


def named_modules(configs: dict[str, Any]) -> set[str]:
    """Return the files of a checkpoint that an `auto_map` of its `read_configs` leads to."""
    own = {name for entries in configs.values() for name in _references(entries) if "--" not in name}
    return {f"{name.rpartition('.')[0]}.py" for name in own}


def _references(entries: object) -> Iterator[str]:
    """Yield the classes that `auto_map` names, at any depth. The entry of a tokenizer is a list of two."""
    for key, value in _entries(entries):
        if key == "auto_map":
            classes = value.values() if isinstance(value, dict) else [value]
            for names in classes:
                yield from map(str, filter(None, names if isinstance(names, list) else [names]))


def _entries(content: object) -> Iterator[tuple[str, object]]:
    """Yield every key of the objects in a JSON value, at any depth, with its value."""
    inner: Iterable[object] = ()
    if isinstance(content, dict):
        yield from content.items()
        inner = content.values()
    elif isinstance(content, list):
        inner = content
    for value in inner:
        yield from _entries(value)

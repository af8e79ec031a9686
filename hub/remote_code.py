"""Find in a directory of Python files what would break, mostly without an error, once they are remote code.

Transformers does not run the files of a checkpoint as a package. Saving and loading copy the files that two regular
expressions find into one flat directory. Python accepts imports that these expressions miss, so code that works as a
package can be published with files missing.
"""

import ast
import re
import sys
from pathlib import Path
from typing import NotRequired

from transformers.dynamic_module_utils import get_imports, get_relative_imports
from typing_extensions import TypedDict

from common.command_io import read_json


# Packages that are installed wherever the checkpoint is loaded.
ALWAYS_INSTALLED = sys.stdlib_module_names | {"accelerate", "huggingface_hub", "safetensors", "torch", "transformers"}


class _Config(TypedDict):
    auto_map: NotRequired[dict[str, str]]


def check_remote_code(directory: str | Path) -> list[str]:
    """Return the mistakes in the code that `directory` ships, each as "file:line: what is wrong, what to do".

    If there is a config.json, the code is what its `auto_map` leads to. Otherwise it is every .py file but
    __init__.py, which never ships.
    """
    directory = Path(directory).resolve()
    problems: list[str] = []
    classes: set[tuple[str, ...]] = set()
    if (directory / "config.json").is_file():
        auto_map = read_json(directory / "config.json", _Config).get("auto_map", {})
        classes = {reference.rpartition(".")[::2] for reference in auto_map.values()}
        modules = sorted({module for module, _ in classes})
    else:
        modules = sorted(path.stem for path in directory.glob("*.py") if path.stem != "__init__")

    siblings = {path.stem for path in directory.glob("*.py")} | {directory.name}
    seen = set()
    while modules:
        module = modules.pop(0)
        if module in seen:
            continue
        seen.add(module)
        path = directory / f"{module}.py"
        if "--" in module:
            problems.append(f"config.json: auto_map points at another repository with {module!r}: name the file here.")
        elif not path.is_file():
            problems.append(f"{path.name}: needed by auto_map or an import, and missing.")
        else:
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except SyntaxError as error:
                problems.append(f"{path.name}:{error.lineno}: {error.msg}.")
                continue
            except ValueError as error:
                problems.append(f"{path.name}: no UTF-8 text: {error}.")
                continue
            found, imported = _check_file(path, tree, siblings)
            problems += found
            modules += sorted(imported)
            defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
            for name in sorted({name for owner, name in classes if owner == module} - defined):
                problems.append(f"{path.name}: auto_map expects the class {name}, which it does not define.")
    return problems


def _check_file(path: Path, tree: ast.Module, siblings: set[str]) -> tuple[list[str], set[str]]:
    """Return the mistakes in one file, and the siblings it imports."""
    mistakes: list[tuple[int, str]] = []
    relative: dict[str, int] = {}
    absolute: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            relative["." * node.level + (node.module or "")] = node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            absolute.setdefault(node.module.split(".")[0], node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:  # the walk comes to the ones inside `try` last
                absolute.setdefault(alias.name.split(".")[0], node.lineno)
        elif isinstance(node, ast.Call) and _imports_relatively(node):
            mistakes.append((node.lineno, "importlib with a relative name is not followed; write `from .name import`"))

    text = path.read_text(encoding="utf-8")
    followed = {f".{name}" for name in get_relative_imports(path)}
    for name, line in relative.items():
        if name == ".":
            mistakes.append((line, "`from . import` is not followed; write `from .name import`"))
        elif name.count(".") > 1:
            mistakes.append((line, f"{name} is not beside this file; a checkpoint is one flat directory"))
        elif name not in followed:
            mistakes.append((line, f"the import of {name} is not followed; begin a line with `from {name} import`"))
    for name in followed - set(relative):
        match = re.search(rf"^\s*(from|import)\s+{re.escape(name)}\s", text, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start(1)) + 1  # `followed` matched it
        mistakes.append((line, f"this text is taken for an import of {name}; begin the line with another word"))

    optional = absolute.keys() - siblings - ALWAYS_INSTALLED
    unguarded = optional.intersection(get_imports(path) if optional else ())  # mostly none, and to look takes long
    for name, line in absolute.items():
        if name in siblings:
            mistakes.append((line, f"the absolute import of {name} is not copied; write `from .name import`"))
        elif name in unguarded:
            mistakes.append((line, f"{name} may not be installed; import it in `try: ... except ImportError`"))
    flat = {name[1:] for name in relative if name.count(".") == 1 and name != "."}
    return [f"{path.name}:{line}: {mistake}." for line, mistake in sorted(mistakes)], flat


def _imports_relatively(call: ast.Call) -> bool:
    """Tell if this is `import_module` with a relative name, computed or not."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if name != "import_module" or not call.args:
        return False
    first = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) and call.args[0].values else call.args[0]
    literal = str(first.value) if isinstance(first, ast.Constant) else ""
    return literal.startswith(".") or len(call.args) + len(call.keywords) > 1

"""Write docs/API.md: the arguments of what `modeling_iha` exports and of the commands, from docstrings.

example: PYTHONPATH=. python docs/write_api.py      # writes docs/API.md
"""

import argparse
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import fill

import modeling_iha
from iha import api
from iha.files import expanded


START = """# API
This page lists the public names of `modeling_iha`. `python docs/write_api.py` writes it from the
docstrings."""
COMMANDS = """`from iha.api import convert, verify, push, pull` gives the commands as functions. Their
arguments are the options of the commands, which `iha COMMAND --help` explains."""


def paragraphs(text: str, first: str = "", others: str = "") -> str:
    """Return a text with each paragraph wrapped at 100 columns, behind an indent of its first and its other lines."""
    return "\n\n".join(
        fill(" ".join(part.split()), 100, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
        for part in text.split("\n\n")
    )


def arguments(docstring: str) -> tuple[str, str, str]:
    """Return what a docstring says before its arguments, a list of them, and what it says after them."""
    text = re.sub(r"\[(`\w+`)\]", r"\1", inspect.cleandoc(docstring))
    before, _, rest = text.partition("\n\nArgs:\n")
    listed, _, after = rest.partition("\n\n")
    entry = r"^    (\w+)(?: \(.*?((?:defaults to|given).*?)?\))?:\s*(.*?)(?=^    \w|\Z)"
    entries = re.findall(entry, listed, re.MULTILINE | re.DOTALL)
    items = [f"`{name}`{f' ({default})' if default else ''}: {text}" for name, default, text in entries]
    return before, "\n".join(paragraphs(item, "- ", "  ") for item in items), after.partition("```")[0]


def called(name: str, value: Callable) -> str:
    """Return the heading of a function or a class, its signature and the first paragraph of its docstring."""
    signature = inspect.signature((lambda **fields: None) if inspect.isclass(value) else value)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name != "self"]
    call = fill(f"{name}{inspect.Signature(bare)}", 100, subsequent_indent="    ")
    first = arguments(value.__doc__)[0].partition("\n\n")[0]
    return f"## {name}\n\n```text\n{call}\n```\n\n{paragraphs(first)}"


def described(name: str, value: Callable) -> str:
    """Return the section of a function, or of a class with arguments."""
    before, listed, after = arguments(value.__doc__)
    parts = (called(name, value), paragraphs(before.partition("\n\n")[2]), listed, paragraphs(after))
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """Return docs/API.md."""
    exported = {name: getattr(modeling_iha, name) for name in modeling_iha.__all__}
    functions = {name: value for name, value in exported.items() if inspect.isfunction(value)}
    models = ", ".join(f"`{name}`" for name in exported if name not in functions and name != "IHAConfig")
    sections = [described(name, value) for name, value in functions.items()]
    sections.append(described("IHAConfig", modeling_iha.IHAConfig))
    sections.append(described("IHAConfig.from_preset", modeling_iha.IHAConfig.from_preset))
    calls = "are called as Llama's are, with keywords after `position_ids`"
    sections.append("## The models\n\n" + paragraphs(f"{models} take an `IHAConfig`, and {calls}."))
    sections.append("## Commands\n\n" + paragraphs(COMMANDS))
    sections += ["#" + called(name, getattr(api, name)) for name in api.__all__]
    return "\n\n".join([START, *sections]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", default=Path(__file__).with_name("API.md"), type=expanded)
    parser.parse_args().path.write_text(page(), encoding="utf-8")

"""Answer in one line, with a bound, whatever comes from outside."""

import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from helpers import last_line
from pydantic import FiniteFloat
from typing_extensions import TypedDict

from iha import errors, files
from iha.errors import UserError, run_cli
from iha.files import new_directory, read_json, read_jsonl, read_yaml, whole_file


# What is left of an exception


def failing(error=KeyError("value\n")):
    raise error


@pytest.fixture
def fails(monkeypatch, capsys, tmp_path):
    """Return a function that runs a `main` as a command with arguments, and returns its line on stderr."""
    monkeypatch.setattr(errors.tempfile, "tempdir", str(tmp_path))

    def fails(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["room/command.py", *arguments])
        with pytest.raises(SystemExit, match="^1$"):
            run_cli(main)
        assert sys.argv == ["room/command.py", *arguments]
        return last_line(capsys.readouterr().err)

    return fails


def test_a_defect_is_one_line_that_names_its_traceback(fails, monkeypatch, tmp_path):
    line = fails(failing, "results.json")
    assert re.match(r"Error: command.py results\.json failed in test_borders.py, line \d+: KeyError: ", line)
    (file,) = tmp_path.iterdir()
    assert line.endswith(f"--traceback shows more, as does {file}.")
    assert file.read_text().startswith("Traceback") and "in failing" in file.read_text()
    monkeypatch.setattr(errors.tempfile, "tempdir", "/proc/nowhere")
    panic = type("PanicException", (BaseException,), {})  # of a library in Rust
    assert re.search("PanicException: `None`; --traceback shows more.$", fails(partial(failing, panic("`None`"))))


# What is read


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.mark.parametrize("read", [read_json, read_yaml, lambda path: list(read_jsonl(path))])
def test_only_a_regular_file_is_read(read, fifo):
    for path in (fifo, fifo.parent, Path("/dev/zero")):
        with pytest.raises(UserError, match="is no regular file"):
            read(path)


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        (read_json, b'{"a": ' * 10**5, "cannot be read as JSON"),
        (read_json, b" " * 2000, "has more than 1,000 bytes"),
        (read_yaml, b"[" * 10**4, "has more than 1,000 bytes"),
        (read_yaml, b"[" * 999, "cannot be read as YAML"),
        (read_jsonl, b'{"a": 1}\n' + b'{"a": ' * 100, "row 2 is no object of JSON in UTF-8"),
        (read_jsonl, b'{"a": 1}\n\n[1]\n', r"row 2: it is \[1\]: expected a valid dictionary"),
        (read_jsonl, b" " * 999 + b"{}\n", "row 1 has more than 1,000 bytes"),
    ],
)
def test_what_is_read_is_bounded(read, content, words, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_TEXT", 10**7 if content[:1] == b"{" else 1000)
    monkeypatch.setattr(files, "MAX_YAML", 1000)
    path = tmp_path / "file"
    path.write_bytes(content)
    start = time.process_time()
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}.*{words}"):
        list(read(path))
    assert time.process_time() - start < 5


class Figure(TypedDict):
    value: FiniteFloat
    stderr: FiniteFloat | None


class Record(TypedDict):
    suite: Literal["smoke", "paper"]
    figures: dict[str, Figure]


GOOD = {"suite": "smoke", "figures": {"acc": {"value": 1, "stderr": None, "more": 2}}, "more": 3}


NAN = {"acc": {"value": float("nan"), "stderr": 0}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "suite is missing"),
        (GOOD | {"suite": "all"}, "suite is 'all': expected 'smoke' or 'paper'"),
        (GOOD | {"figures": {"acc": {"value": True, "stderr": 0}}}, "figures.acc.value is True: expected a valid num"),
        (GOOD | {"figures": NAN}, "figures.acc.value is nan: expected a finite number"),
        (GOOD | {"suite": "1" * 999}, "suite is '1+[.]{3}1+': expected"),
    ],
)
def test_what_is_read_has_the_types_that_are_asked_for(content, words, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(GOOD) + "\n")
    assert read_json(path, Record) == read_yaml(path, Record) == next(read_jsonl(path, Record)) == GOOD
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"^{path}: {words}"):
        read_json(path, Record)


# What is written


def test_a_place_that_takes_no_file_is_named():
    with pytest.raises(UserError, match="^/proc/here cannot be made"), new_directory("/proc/here"):
        pass


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    """Keep its permissions, a link that leads to it, and what another writer writes meanwhile."""
    (tmp_path / "new").mkdir()
    path, link = tmp_path / "new" / "file", tmp_path / "link"
    link.symlink_to(path)
    for mode in (0o600, 0o644):
        with whole_file(link) as first, whole_file(link) as second:
            first.write_text("first")
            second.write_text("second")
        assert path.read_text() == "first" and link.is_symlink()
        path.chmod(mode)
        with whole_file(link) as temporary:
            temporary.write_text("figures")
        assert path.stat().st_mode & 0o777 == mode
    with pytest.raises(ZeroDivisionError), whole_file(link) as temporary:
        temporary.write_text("half")
        1 / 0
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("file", "figures")]

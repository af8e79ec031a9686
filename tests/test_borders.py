"""Read what comes from outside by type, write an output whole or not at all, and answer an error in one line."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from multiprocessing import get_context
from typing import Literal

import pytest
from helpers import last_line
from pydantic import FiniteFloat
from typing_extensions import TypedDict

from iha import errors
from iha.errors import ROOT, UserError, run_cli
from iha.files import (
    check_output_file,
    new_directory,
    read_json,
    read_jsonl,
    read_yaml,
    sole_writer,
    whole_file,
    write_json,
)
from iha.sources import locate


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
    panic = type("PanicException", (BaseException,), {})  # of a library in Rust
    assert "PanicException: `None`; --traceback" in fails(partial(failing, panic("`None`")))
    command = [sys.executable, "-m", "iha.cli", "verify", "absent", "absent", "--traceback"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stderr
    assert shown.startswith("Traceback") and "UserError: " in shown


def test_a_mistake_of_the_user_is_one_line(fails):
    assert fails(partial(failing, UserError("No such\nmodel."))) == "Error: No such model."
    assert fails(lambda: None, "--out", "") == (
        "Error: argument 2 is empty: expected a value; is a variable of the shell not set?"
    )


def test_a_reader_that_has_seen_enough_is_no_error():
    """Close the pipe behind a command before it prints, as `head` does."""
    program = "from iha.errors import run_cli; run_cli(lambda: print('x' * 10**6, flush=True))"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE and process.stderr.read() == b""
    process.stderr.close()


# What is read


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        (read_json, "{", " cannot be read as JSON"),
        (read_yaml, "a: [", " cannot be read as YAML"),
        (read_jsonl, '\n{"a": 1}\n{"a": ', ", line 3 is no object of JSON"),
        (read_jsonl, "[1]\n", r", line 1: it is \[1\]: expected a valid dictionary"),
    ],
)
def test_what_cannot_be_read_is_named(read, content, words, tmp_path):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}{words}"):
        list(read(path))


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


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    """Keep its permissions, and a link that leads to it."""
    (tmp_path / "new").mkdir()
    path, link = tmp_path / "new" / "file", tmp_path / "link"
    link.symlink_to(path)
    for mode in (0o600, 0o644):
        with whole_file(link) as temporary:
            temporary.write_text("figures")
        assert path.read_text() == "figures" and link.is_symlink()
        path.chmod(mode)
        with whole_file(link) as temporary:
            temporary.write_text("figures")
        assert path.stat().st_mode & 0o777 == mode
    with pytest.raises(ZeroDivisionError), whole_file(link) as temporary:
        temporary.write_text("half")
        1 / 0
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [("file", "figures")]


def test_a_bad_destination_is_found_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    before = sorted(tmp_path.rglob("*"))
    for destination, words in (
        ("full", "is not an empty directory"),
        ("full/precious.txt", "is not an empty directory"),
        ("link", "is a symbolic link"),
        ("empty", "is the current directory"),
        ("full/precious.txt/out", "takes no new file"),
    ):
        with pytest.raises(UserError, match=words), new_directory(tmp_path / destination):
            pytest.fail("the work began")
    for file, words in (
        ("full", "is no regular file"),
        ("/dev/null", "is no regular file"),
        ("full/precious.txt", "precious.txt exists: remove it"),
    ):
        with pytest.raises(UserError, match=words):
            check_output_file(tmp_path / file)
    check_output_file(tmp_path / "full" / "precious.txt", replace=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_leaves_no_directory_that_it_made(tmp_path):
    (tmp_path / "mine").mkdir()
    for place in ("new/deep/out", "mine/out", "mine"):
        for writer in (new_directory, sole_writer):
            with pytest.raises(ZeroDivisionError), writer(tmp_path / place):
                1 / 0
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_an_empty_directory_is_taken_and_stays_private(tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    with new_directory(tmp_path / "out") as directory:
        (directory / "file").touch()
    assert (tmp_path / "out" / "file").exists() and (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_second_run_overwrites_nothing(tmp_path):
    """Start two runs for one directory: the first to end wins."""
    with pytest.raises(OSError, match="not empty"), new_directory(tmp_path / "out") as second:
        (second / "file").write_text("second")
        with new_directory(tmp_path / "out") as first:
            (first / "file").write_text("first")
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with sole_writer(tmp_path / "run"):
        with pytest.raises(UserError, match="Another run is writing"), sole_writer(tmp_path / "run"):
            pass
    assert not (tmp_path / "run").exists()


def write_slowly(destination, ready):
    """Run in a separate process, with the signals of one that is started in a terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)

    def main():
        with new_directory(destination) as directory, whole_file(directory / "file") as temporary:
            temporary.write_text("half")
            ready.set()
            signal.pause()

    run_cli(main)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(number, tmp_path):
    context = get_context("fork")  # a new interpreter would take seconds to import PyTorch
    ready = context.Event()
    process = context.Process(target=write_slowly, args=(tmp_path / "out", ready))
    process.start()
    assert ready.wait(30)
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 128 + number and not list(tmp_path.iterdir())


def test_a_home_directory_is_found(tmp_path, monkeypatch):
    """No shell replaces the "~" in a call from Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # where broken code would make a directory "~"
    check_output_file("~/figures.json")
    write_json("~/figures.json", {})
    assert (tmp_path / "figures.json").read_text() == "{}\n"
    with new_directory("~/out"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", "out"}
    with pytest.raises(UserError, match="~nobody-of-this-name/model is not a directory|is neither a directory"):
        locate("~nobody-of-this-name/model")

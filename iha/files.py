"""Read files from outside by type, and write an output whole or not at all."""

import hashlib
import inspect
import json
import os
import reprlib
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints

import yaml
from filelock import FileLock, Timeout

from iha.errors import ROOT, UserError, refusing


# Outputs


@contextmanager
def new_directory(dst: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary directory to write into, which becomes `dst` on success.

    It is removed on any exception, Ctrl-C, SIGTERM and SIGHUP. Raise `UserError` before anything is done unless `dst`
    is free or an empty directory.
    """
    check_new_directory(dst)
    dst = _absolute(dst)
    with _beside(dst) as temporary:
        temporary.mkdir()
        if dst.is_dir():
            shutil.copymode(dst, temporary)  # it may be private
        yield temporary
        os.replace(temporary, dst)


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path to write to, which becomes `path` on success.

    `path` holds its old content or all of the new, never a part, and keeps its permissions. Missing directories are
    made. A symbolic link stays one.
    """
    path = Path(os.path.realpath(expanded(path)))
    with _beside(path) as temporary:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield a path of the same name in a temporary directory next to `path`, from which a move is one step."""
    prefix = f"{path.name}.unfinished-"
    with signals_as_interrupts(), _made(path.parent), TemporaryDirectory(prefix=prefix, dir=path.parent) as directory:
        yield Path(directory, path.name)


@contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Make a directory and its parents where they are missing, and in the end remove those of them that are empty."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in missing:
            with suppress(OSError):  # it is not empty
                each.rmdir()


def check_new_directory(dst: str | os.PathLike) -> None:
    """Raise `UserError` unless `dst` is free or an empty directory, where a directory can be made."""
    dst = _absolute(dst)
    if dst.is_symlink():
        raise UserError(f"{dst} is a symbolic link: give the path it leads to, or remove it.")
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(f"{dst} exists and is not an empty directory: remove it or choose another output path.")
    if dst == Path.cwd():
        raise UserError(f"{dst} is the current directory, which no new one can replace: choose a path inside it.")
    _check_takes_files(dst)


def check_output_file(path: str | os.PathLike, replace: bool = False) -> None:
    """Reject, before the work, a `path` that `whole_file` could not write after it.

    A file of that name is rejected too, unless it may be replaced. Raise `UserError`.
    """
    path = Path(os.path.realpath(expanded(path)))
    if path.exists() and not path.is_file():  # a directory, or a device, whose place the file would take
        raise UserError(f"{path} is no regular file: expected the name of a file to write.")
    if path.exists() and not replace:
        raise UserError(f"{path} exists: remove it or choose another name.")
    _check_takes_files(path)


def _check_takes_files(path: Path) -> None:
    """Raise `UserError` where no file or directory `path` can be made, for itself or its missing parents."""
    directory = next(parent for parent in path.parents if parent.exists())
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise UserError(f"{path} cannot be written: {directory} takes no new file.")


@contextmanager
def sole_writer(directory: str | os.PathLike) -> Iterator[None]:
    """Lock `directory`, which is made if it is missing, and is then removed in the end if it is empty.

    The system drops the lock when the process ends, however it ends. Raise `UserError` when another run holds it.
    """
    directory = _absolute(directory)
    with _made(directory):
        # Try for a moment, because a run that ends may remove the file that this one has just opened.
        lock = FileLock(directory / ".lock", timeout=0.2, poll_interval=0.02, fallback_to_soft=False)
        try:
            lock.acquire()
        except Timeout:
            wrong = f"Another run is writing {directory}"
            raise UserError(f"{wrong}: wait for it, or choose another output path.") from None
        try:
            yield
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `KeyboardInterrupt(signal)`, unless the process ignores or handles them."""

    def interrupt(number, frame):
        raise KeyboardInterrupt(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    changeable = (signal.SIGTERM, signal.SIGHUP) if in_main_thread else ()  # Python sets handlers nowhere else
    numbers = [number for number in changeable if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def write_json(path: str | os.PathLike, content: dict) -> None:
    """Write a dictionary of JSON values to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_jsonl(path: str | os.PathLike, rows: list[dict]) -> None:
    """Write rows of JSON values to `path`, one to a line, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# Names and versions


def expanded(path: str | os.PathLike) -> Path:
    """Return a path with the home directory for `~`, which no shell replaces in a call from Python or behind a "=".

    The `~` of an unknown user stays.
    """
    return Path(os.path.expanduser(path))


def _absolute(path: str | os.PathLike) -> Path:
    return Path(os.path.abspath(expanded(path)))


def file_sha256(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def current_commit() -> str:
    """Return the commit of this checkout, with "-dirty" where files differ from it.

    It is "unknown" without git, and for a copy inside another repository.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), "--no-optional-locks", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "unknown"
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# Inputs


def read_text(path: str | os.PathLike) -> str:
    """Return the text of a file in UTF-8. Raise `UserError`."""
    with refusing(f"{path} cannot be read", OSError, ValueError):
        return Path(path).read_text(encoding="utf-8")


def read_json(path: str | os.PathLike, shape: Any = dict) -> Any:
    """Return what a JSON file holds, of the types that `shape` names: see `typed`. Raise `UserError`."""
    text = read_text(path)
    with refusing(f"{path} cannot be read as JSON", ValueError):
        content = json.loads(text)
    return typed(content, shape, path)


def read_yaml(path: str | os.PathLike, shape: Any = Any) -> Any:
    """Return what a YAML file holds, of the types that `shape` names: see `typed`. Raise `UserError`."""
    return parse_yaml(read_text(path), path, shape)


def parse_yaml(text: str, source: str | os.PathLike, shape: Any = Any) -> Any:
    """Return what a text in YAML that comes from `source` holds, as `read_yaml` does. Raise `UserError`."""
    with refusing(f"{source} cannot be read as YAML", ValueError, yaml.YAMLError):
        content = yaml.safe_load(text)
    return typed(content, shape, source)


def read_jsonl(path: str | os.PathLike, shape: Any = dict) -> Iterator[dict]:
    """Yield the rows of a JSON-lines file, of the types that `shape` names: see `typed`.

    Each line that is not empty is one object. Raise `UserError`, which names the line.
    """
    # Some editors begin a file with a byte order mark.
    with refusing(f"{path} cannot be read", OSError, ValueError), open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            with refusing(f"{place} is no object of JSON", ValueError):
                row = json.loads(line)
            yield typed(row, shape, place)


def typed(content: Any, shape: Any, source: str | os.PathLike) -> Any:
    """Return `content`, which was read from `source`, if it has the types that `shape` names.

    `shape` is any type that pydantic knows, mostly a `typing_extensions.TypedDict`. Values are not converted, and keys
    that `shape` does not name stay. Raise a `UserError` that names the first key with a wrong value.
    """
    from pydantic import ValidationError  # here: benchmarks of a GPU run without it

    try:
        _validator(shape).validate_python(content, strict=True)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"])) or "it"
        raise UserError(f"{source}: {key} is {_what_is_wrong(error)}") from None
    return content


@cache
def _validator(shape: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def _what_is_wrong(error: Any) -> str:
    """Return the first wrong value of a pydantic `ValidationError`, and what was expected."""
    first = error.errors(include_url=False)[0]
    wrong = "missing" if first["type"] == "missing" else reprlib.repr(first["input"])
    expected = first["msg"].replace("Input should be", "expected").replace("greater than or equal to", "at least")
    return f"{wrong}: {expected}."


def checked(function: Callable) -> Callable:
    """Have a function check its arguments by its annotations, types that pydantic knows. It raises a `UserError`."""
    from pydantic import ValidationError

    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)

    @wraps(function)
    def call(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            try:
                given.arguments[name] = _validator(hints[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise UserError(f"{name}={_what_is_wrong(error)}") from None
        return function(*given.args, **given.kwargs)

    return call

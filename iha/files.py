"""Read files from outside with a bound on their size and by type, and write an output whole or not at all."""

import hashlib
import inspect
import json
import os
import reprlib
import secrets
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from io import BufferedReader
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from filelock import FileLock, Timeout

from iha.errors import ROOT, UserError, one_line, refusing


MAX_TEXT = 2**26  # bytes of a JSON file or of one row: far more than any record here
MAX_YAML = 2**17  # bytes: PyYAML reads a megabyte in half a minute


@contextmanager
def new_directory(dst: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary sibling of `dst` to write into, which becomes `dst` on success.

    The sibling is removed on any exception, Ctrl-C, SIGTERM and SIGHUP. The next run for the same `dst` removes what a
    killed run left. Raise `UserError` before anything is done when `dst` is anything but an empty directory, cannot be
    made or replaced, or is being written by another run.
    """
    check_new_directory(dst)
    dst = _absolute(dst)
    is_made = False
    try:
        with signals_as_interrupts(), _temporary_sibling(dst) as temporary:
            yield temporary
            os.replace(temporary, dst)
            is_made = True
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{dst} is complete." if is_made else f"{dst} was not made: the same command starts again.")
        raise


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write to, which becomes `path` on success.

    `path` holds its old content or all of the new, never a part, and keeps its permissions. Missing directories are
    made. A symbolic link stays one.
    """
    path = Path(os.path.realpath(expanded(path)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with signals_as_interrupts():
        temporary = _new_sibling(path)
        try:
            with suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _new_sibling(path: Path) -> Path:
    """Make an empty file under a new name next to `path`, so that it is neither another writer's file nor a link."""
    sibling = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    sibling.touch(exist_ok=False)
    return sibling


def check_output_file(path: str | os.PathLike, replace: bool = False) -> None:
    """Reject, before the work, a `path` that `whole_file` could not write after it.

    A file of that name is rejected too, unless it may be replaced. Raise `UserError`.
    """
    path = Path(os.path.realpath(expanded(path)))
    try:
        if path.exists() and not path.is_file():
            what = "a directory" if path.is_dir() else "no regular file"
            raise UserError(f"{path} is {what}: expected the name of a file to write.")
        if path.exists() and not replace:
            raise UserError(f"{path} exists: remove it or choose another name.")
        directory = next(parent for parent in path.parents if parent.exists())
        _new_sibling(directory / path.name).unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


@contextmanager
def sole_writer(directory: str | os.PathLike) -> Iterator[None]:
    """Lock `directory`, which is made if it is missing, and remove it in the end if it is empty.

    The system drops the lock when the process ends, however it ends. Raise `UserError` when another run holds the
    lock, and when the file system has no locks.
    """
    directory = _absolute(directory)
    try:
        with _locked(directory / ".lock", directory):
            yield
    finally:
        with suppress(OSError):
            directory.rmdir()


def check_new_directory(dst: str | os.PathLike) -> None:
    """Raise `UserError` unless `dst` is free or an empty directory, and its parents can be made."""
    dst = _absolute(dst)
    if dst.is_symlink():
        raise UserError(f"{dst} is a symbolic link: give the path it leads to, or remove it.")
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(f"{dst} exists and is not an empty directory: remove it or choose another output path.")
    if os.path.ismount(dst) or os.path.realpath(dst) == os.getcwd():
        where = "a mount point" if os.path.ismount(dst) else "the current directory"
        raise UserError(f"{dst} is {where}, which no new directory can replace: choose a path inside it.")
    parent = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise UserError(f"{dst} cannot be made: {parent} is not a directory.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{dst} cannot be made: no permission to write in {parent}.")


def expanded(path: str | os.PathLike) -> Path:
    """Return a path with the home directory for `~`, which no shell replaces in a call from Python or behind a "=".

    The `~` of an unknown user stays.
    """
    return Path(os.path.expanduser(path))


def _absolute(path: str | os.PathLike) -> Path:
    return Path(os.path.abspath(expanded(path)))


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


@contextmanager
def _temporary_sibling(dst: Path) -> Iterator[Path]:
    """Yield the new directory .NAME.unfinished next to `dst`, and remove it if it still exists in the end.

    The file .NAME.lock next to it is locked meanwhile. The system drops the lock of a run that is killed, and the next
    run removes what that one left. Raise `UserError` when another run holds the lock.
    """
    temporary = dst.with_name(f".{dst.name}.unfinished")
    with _locked(dst.with_name(f".{dst.name}.lock"), dst):
        check_new_directory(dst)  # another run may have finished since
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        if dst.is_dir():  # an empty one, which may be private
            temporary.chmod(stat.S_IMODE(dst.stat().st_mode))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path, dst: Path) -> Iterator[None]:
    """Lock the file `path`, which is made if it is missing and removed in the end.

    Its missing parents are made, and removed in the end if they are empty. Raise `UserError`, which names `dst`, when
    another run holds the lock and when the file cannot be locked.
    """
    made = [parent for parent in path.parents if not parent.exists()]  # the innermost first
    # Try for a moment, because a run that ends may remove the file that this one has just opened.
    lock = FileLock(path, timeout=0.2, poll_interval=0.02, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            path.touch()  # FileLock also waits where no file can be made: this raises the reason
            raise
    except Timeout:
        raise UserError(f"Another run is writing {dst}: wait for it, or choose another output path.") from None
    except OSError as error:
        raise UserError(f"{dst} cannot be made: {path} cannot be locked: {one_line(error)}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # one that is not empty
            for parent in made:
                parent.rmdir()


def write_json(path: str | os.PathLike, content: dict) -> None:
    """Write a dictionary of JSON values to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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


def open_regular(path: str | os.PathLike) -> BufferedReader:
    """Open a file for reading bytes. Raise `UserError` unless it is a regular file: a FIFO would wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UserError(f"{path} is no regular file: expected a file to read.")
    return open(path, "rb")


def read_text(path: str | os.PathLike, most: int) -> str:
    """Return the text of a regular file in UTF-8 of at most `most` bytes. Raise `UserError` for any other."""
    with refusing(f"{path} cannot be read", OSError, ValueError), open_regular(path) as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise UserError(f"{path} has more than {most:,} bytes: expected a smaller file.")
        return content.decode()


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


def read_json(path: str | os.PathLike, shape: Any = dict) -> Any:
    """Return what a JSON file holds, of the types that `shape` names: see `typed`. Raise `UserError`."""
    text = read_text(path, MAX_TEXT)
    with refusing(f"{path} cannot be read as JSON", ValueError, RecursionError):
        content = json.loads(text)
    return typed(content, shape, path)


def read_yaml(path: str | os.PathLike, shape: Any = Any) -> Any:
    """Return what a YAML file holds, of the types that `shape` names: see `typed`. Raise `UserError`."""
    return parse_yaml(read_text(path, MAX_YAML), path, shape)


def parse_yaml(text: str, source: str | os.PathLike, shape: Any = Any) -> Any:
    """Return what a text in YAML that comes from `source` holds, as `read_yaml` does. Raise `UserError`."""
    if len(text) > MAX_YAML:
        raise UserError(f"{source} has more than {MAX_YAML:,} characters of YAML: expected fewer.")
    with refusing(f"{source} cannot be read as YAML", ValueError, RecursionError, yaml.YAMLError):
        content = yaml.safe_load(text)
    return typed(content, shape, source)


def read_jsonl(path: str | os.PathLike, shape: Any = dict) -> Iterator[dict]:
    """Yield the rows of a JSON-lines file, of the types that `shape` names: see `typed`.

    Each line is one object, and empty lines do not count. Raise `UserError`, which names the row.
    """
    with open_regular(path) as file:
        lines = filter(bytes.strip, iter(lambda: file.readline(MAX_TEXT + 1), b""))
        yield from (_row(line, f"{path}, row {number}", shape) for number, line in enumerate(lines, 1))


def _row(line: bytes, source: str, shape: Any) -> dict:
    """Return the object in a line of JSON. Raise `UserError`."""
    if len(line) > MAX_TEXT:
        raise UserError(f"{source} has more than {MAX_TEXT:,} bytes: expected a shorter line.")
    # Numbers of too many digits and objects too deep for Python are not JSONDecodeErrors.
    with refusing(f"{source} is no object of JSON in UTF-8", ValueError, RecursionError):
        # Some editors begin a file with a byte order mark.
        row = json.loads(line.decode("utf-8-sig"))
    return typed(row, shape, source)


def write_jsonl(path: str | os.PathLike, rows: list[dict]) -> None:
    """Write rows of JSON values to `path`, one to a line, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

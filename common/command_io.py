"""Hold what every command does in the same way.

An error is one line. An output is written whole or not at all. Mistakes in JSON are named. One command runs another.
"""

import atexit
import gc
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout


ROOT = Path(__file__).resolve().parents[1]


class UserError(Exception):
    """Report a mistake that the user can fix, in one line: what was wrong, what was expected, what to do."""


def run_cli(main: Callable[[], object]) -> None:
    """Run a command's `main` and turn its errors into one line on stderr and an exit code.

    The code is 1 for a mistake of the user and for a refusal of the machine, such as a full disk, and 130 for Ctrl-C.
    Any other exception is a defect and keeps its traceback.

    A command that has read its arguments imports its libraries without the garbage collector: each collection would
    walk through all that they make, a quarter of their time.
    """
    if not gc.isenabled():
        gc.freeze()
        # At the end nanobind, of Triton 3.9 for one, lists what is frozen as leaks, on 25 lines.
        if any(type(of_a_library).__module__ == "nanobind" for of_a_library in object.__subclasses__()):
            atexit.register(gc.unfreeze)
        gc.enable()
    if not sys.stderr.isatty() and "transformers" in sys.modules:  # to import it for --help would take seconds
        sys.modules["transformers"].utils.logging.disable_progress_bar()  # a log would keep every state of a bar
    try:
        if "" in sys.argv[1:]:  # as a path it would be the current directory
            raise UserError(
                f"argument {sys.argv.index('', 1)} is empty: expected a value; is a variable of the shell not set?"
            )
        main()
    except KeyboardInterrupt as interrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
    except Exception as error:
        # safetensors, tokenizers and PyTorch wrap the system's error in exception types of their own, and keep its
        # wording.
        refused = ("(os error ", "can't allocate memory")
        if not isinstance(error, (UserError, OSError, MemoryError)) and not any(
            text in str(error) for text in refused
        ):
            raise
        print(f"Error: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    if "torch" not in sys.modules:
        gc.disable()  # until the command itself runs


def one_line(error: BaseException) -> str:
    """Return the message of `error` on one line, or the name of its class when it has no message."""
    return printable(" ".join(str(error).split())) or type(error).__name__


@contextmanager
def refusing(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn these exceptions of the block into a `UserError` that says `what` and the library's message."""
    try:
        yield
    except errors as error:
        raise UserError(f"{what}: {one_line(error)}") from error


def printable(text: str) -> str:
    """Return `text` with its control characters escaped, because a terminal acts on those that a stranger wrote."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def path_from_root(text: str) -> Path:
    """Return a path that the user gave, as a command that runs in the root of the checkout needs it.

    A path inside the checkout becomes relative, so that a record of the command names no place of this machine.
    """
    path = Path(os.path.abspath(text))
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def run_module(result: str | os.PathLike, *command: str | os.PathLike) -> None:
    """Run a module of this repository in a process of its own, unless its `result` exists already.

    Raise `UserError` when the module fails.
    """
    if os.path.exists(result):
        print(f"{result} is there: done before", flush=True)
        return
    print(f"$ python -m {' '.join(map(str, command))}", flush=True)
    start = time.monotonic()
    if subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT).returncode != 0:
        raise UserError(f"{result} was not made, see above. Once mended, the same command goes on from here.")
    print(f"   {time.monotonic() - start:.0f} s", flush=True)


@contextmanager
def new_directory(dst: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary sibling of `dst` to write into, which becomes `dst` on success.

    The sibling is removed on any exception, Ctrl-C, SIGTERM and SIGHUP. The next run for the same `dst` removes what a
    killed run left. Raise `UserError` before anything is done when `dst` is anything but an empty directory, cannot be
    made or replaced, or is being written by another run.
    """
    dst = Path(os.path.abspath(dst))
    _check_destination(dst)
    absent = [parent for parent in dst.parents if not parent.exists()]
    try:
        with _signals_as_interrupts(), _temporary_sibling(dst) as temporary:
            yield temporary
            os.replace(temporary, dst)
    except BaseException:
        with suppress(OSError):  # a parent that somebody else uses by now stays
            for parent in absent:
                parent.rmdir()
        raise


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write to, which becomes `path` on success.

    `path` holds its old content or all of the new, never a part. Missing directories are made. A symbolic link stays
    one.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_output_file(path: str | os.PathLike, replace: bool = False) -> None:
    """Refuse, before the work, a `path` that `whole_file` could not write after it.

    A file of that name is refused too, unless it may be replaced. Raise `UserError`.
    """
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            what = "a directory" if path.is_dir() else "no regular file"
            raise UserError(f"{path} is {what}: expected the name of a file to write.")
        if path.exists() and not replace:
            raise UserError(f"{path} exists: remove it or choose another name.")
        directory = next(parent for parent in path.parents if parent.exists())
        probe = directory / f".{path.name}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


@contextmanager
def sole_writer(directory: str | os.PathLike) -> Iterator[None]:
    """Lock `directory`, which is made if it is missing, and remove it in the end if it is empty.

    The system drops the lock when the process ends, however it ends. Raise `UserError` when another run holds the
    lock, and when the file system has no locks.
    """
    directory = Path(os.path.abspath(directory))
    try:
        with _locked(directory / ".lock", directory):
            yield
    finally:
        with suppress(OSError):
            directory.rmdir()


def _check_destination(dst: Path) -> None:
    """Raise `UserError` unless `dst` is free or an empty directory, and its parents can be made."""
    if dst.is_symlink():
        raise UserError(f"{dst} is a symbolic link: give the path it leads to, or remove it.")
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(
            f"{dst} already exists and is not an empty directory: remove it or choose another output path."
        )
    if os.path.ismount(dst) or os.path.realpath(dst) == os.getcwd():
        where = "a mount point" if os.path.ismount(dst) else "the current directory"
        raise UserError(f"{dst} is {where}, which no new directory can replace: choose a path inside it.")
    parent = next(parent for parent in dst.parents if os.path.lexists(parent))
    if not parent.is_dir():
        raise UserError(f"{dst} cannot be made: {parent} is not a directory.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{dst} cannot be made: no permission to write in {parent}.")


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `KeyboardInterrupt(signal)`, unless the process ignores or handles them."""

    def interrupt(number, frame):
        raise KeyboardInterrupt(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if in_main_thread and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _temporary_sibling(dst: Path) -> Iterator[Path]:
    """Yield the new directory .NAME.tmp beside `dst`, and remove it if it still exists in the end.

    The file .NAME.lock beside it is locked meanwhile and says what it is for. The system drops the lock of a killed
    run, so such a file without a lock marks the directory as a leftover. Raise `UserError`.
    """
    temporary, lock_file = dst.with_name(f".{dst.name}.tmp"), dst.with_name(f".{dst.name}.lock")
    with _locked(lock_file, dst):
        _check_destination(dst)  # another run may have finished since
        if os.path.lexists(temporary):
            if not lock_file.read_bytes():
                raise UserError(f"{temporary} exists, and no run of this command made it: remove or rename it.")
            print(f"Removing {temporary}, left by a run that was killed", flush=True)
            shutil.rmtree(temporary)
        lock_file.write_text("A run of this project makes the directory .tmp beside this file.\n")
        temporary.mkdir()
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(path: Path, dst: Path) -> Iterator[None]:
    """Lock the file `path`, which is made if it is missing and removed in the end.

    Raise `UserError`, which names `dst`, when another run holds the lock and when the file cannot be locked.
    """
    # Not at once, because a run that ends may remove the file that this one has just opened.
    lock = FileLock(path, timeout=0.2, poll_interval=0.02, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(f"Another run is writing {dst}: wait for it, or choose another output path.") from None
    except OSError as error:
        raise UserError(f"{dst} cannot be made: {path} cannot be locked: {one_line(error)}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def attention_kinds() -> list[str]:
    """Return the names of all attention kinds, read from file names because options must not wait for PyTorch."""
    files = (path.stem.removeprefix("attention_") for path in ROOT.glob("modeling_iha/attention_*.py"))
    return sorted(set(files) - {"kinds"})


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


def read_json(path: str | os.PathLike) -> dict:
    """Return the object that a JSON file holds, or raise `UserError` when it holds anything else."""
    with refusing(f"{path} cannot be read as JSON", OSError, ValueError, RecursionError):
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}: expected a JSON object.")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of an object as a dictionary.

    Raise `ValueError` for a key given twice, of which JSON and YAML would silently keep the last.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return content


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        unique_keys([(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def read_yaml(path: str | os.PathLike) -> Any:
    """Return the content of a YAML file.

    Raise `OSError`, `yaml.YAMLError`, and `ValueError` for text that is not UTF-8 and for a key given twice.
    """
    return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)


def read_jsonl(path: str | os.PathLike) -> Iterator[dict]:
    """Yield the rows of a JSON-lines file, plain or compressed by gzip.

    Each line is one object, and empty lines do not count. Raise `UserError`, which names the row.
    """
    with open_plain_or_gzip(path) as lines:
        for number, line in enumerate(filter(bytes.strip, lines), 1):
            try:
                row = json.loads(line.decode(), object_pairs_hook=unique_keys)
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, row {number}: not UTF-8 text ({error}).") from None
            # Numbers of too many digits and objects too deep for Python are not JSONDecodeErrors.
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path}, row {number}: not valid JSON ({error}); each line holds one object."
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{path}, row {number}: expected a JSON object, got {row!r:.80}.")
            yield row


def write_jsonl(path: str | os.PathLike, rows: list[dict]) -> None:
    """Write rows of JSON values to `path`, one to a line, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@contextmanager
def open_plain_or_gzip(path: str | os.PathLike) -> Iterator[BufferedIOBase]:
    """Open a file for reading bytes, decompressed if it begins like gzip, whatever its name.

    Raise `UserError` for compressed data that is damaged or cut short.
    """
    with open(path, "rb") as file:
        is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
        with refusing(f"{path} cannot be decompressed", gzip.BadGzipFile, EOFError, zlib.error):
            yield gzip.open(file) if is_compressed else file

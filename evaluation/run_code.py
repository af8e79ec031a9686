"""Run programs that a model wrote, each in a process of its own with limits, never in the evaluating process.

What is guaranteed where Linux (5.12 or newer) lets this user make namespaces, which `isolates` tells: a fresh Python
process with an empty environment; an empty working directory and an empty file system in memory around it, with the
interpreter, its packages and the system's libraries, read-only, and no other file of this machine; a process tree of
its own, all of which dies with the program; no network; limits on CPU time of each process, wall-clock time, address
space of each process, file size and number of processes (which Linux does not count for root).

On any Linux the program dies with the evaluating process, however that ends.

Elsewhere a program can read, change and send whatever the user can, within the limits. This is refused until
`confirm_unsafe_code`, as lm-eval does.

What is not guaranteed: the program shares an interpreter with its tests and with the lines that report their success,
so one that was written against these lines can pass without its tests. Namespaces are as safe as the kernel.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from common.command_io import UserError
from evaluation.run_program import NO_WALL


CPU_SECONDS = 10
WALL_SECONDS = 60
MEMORY_BYTES = 2 * 2**30
FILE_BYTES = 2**20
FLAG = "--confirm-run-unsafe-code"

_confirmed = False


def confirm_unsafe_code(confirmed: bool) -> None:
    """Allow this process to run programs without isolation if the user has `confirmed` it.

    Raise `UserError` where there is no isolation and nobody has confirmed.
    """
    global _confirmed
    _confirmed = _confirmed or confirmed
    if not _confirmed and not isolates():
        raise UserError(
            "This system lets this user make no namespaces (Linux 5.12 or newer does, many containers do not), so "
            "programs that the model writes could read and change all that you can: leave their tasks out, or give "
            f"{FLAG}."
        )


@cache
def isolates() -> bool:
    """Return whether the system can wall a program off from this user's files, processes and network."""
    try:
        return _run("import ctypes, decimal, ssl", wall=True)
    except UserError:
        return False


def passes(program: str, **limits) -> bool:
    """Return whether `program` (Python source, tests included) runs to its end without an exception.

    Args:
        limits: `cpu_seconds`, of CPU time; `wall_seconds`, which bound its sleep; `memory_bytes`, of address space.

    Raise `UserError` where it cannot be isolated and the user has not confirmed to run it nevertheless.
    """
    confirm_unsafe_code(False)
    return _run(program, isolates(), **limits)


def _run(
    program: str,
    wall: bool,
    cpu_seconds: int = CPU_SECONDS,
    wall_seconds: float = WALL_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> bool:
    key, content = secrets.token_hex(16).encode(), program.encode("utf-8", "surrogatepass")
    with (
        tempfile.TemporaryDirectory(prefix="run-code-", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryFile() as report,  # no pipe: what a program writes there would fill this process's memory
    ):
        limits = map(str, (cpu_seconds, memory_bytes, FILE_BYTES))
        process = subprocess.Popen(
            # No user site and no directory of this file on the path; a fixed hash seed, so that a score does not
            # depend on the order of a set.
            [sys.executable, "-s", "-P", Path(__file__).with_name("run_program.py")]
            + [str(os.getpid()), "wall" if wall else "none", home, *limits],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.communicate(b"%d\n%b%b" % (len(content), content, key), timeout=wall_seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        report.seek(0)
        output = report.read(len(key) + 1)
    if process.returncode == NO_WALL:
        raise UserError("The system refused the namespaces of a program: see `dmesg`, and run the command again.")
    return output == key


def passes_each(programs: Sequence[str], **limits) -> list[bool]:
    """Return `passes` of each program, several at a time."""
    with ThreadPoolExecutor(max_workers=min(len(programs), os.cpu_count() or 1) or 1) as pool:
        return list(pool.map(lambda program: passes(program, **limits), programs))

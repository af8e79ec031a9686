"""Run programs that a model wrote, each in a separate Python process with limits, never in the evaluating process.

A program gets an empty working directory, an empty environment, and limits on processor time, wall-clock time, address
space and the size of a file. If bubblewrap (https://github.com/containers/bubblewrap) is installed and works, it also
sees no network, no other process, and no files except the interpreter, its packages and the system's libraries, all
read-only. Without bubblewrap a program can do everything that the user can: run the evaluation in a container.

A program shares its interpreter with its tests, so one that was written against this file can pass without its tests.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache


FLAG = "--confirm-run-unsafe-code"  # the name of lm-eval's flag
FLAG_HELP = "run programs that the model writes; without bubblewrap only limits on the process restrain them"

CPU_SECONDS = 10
WALL_SECONDS = 60
MEMORY_BYTES = 2 * 2**30
FILE_BYTES = 2**20

# The key is written after the last line of the program, so that sys.exit(0) or os._exit(0) before the tests does not
# pass.
_SCRIPT = """
import os, resource, signal
signal.alarm({wall_seconds})  # if the evaluating process is killed, too
for name, limit in {limits}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
report, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
exec(compile({program!r}, "program.py", "exec"), {{}})  # not as `__main__`, as in the benchmarks' own harnesses
os.write(report, {key!r})
os._exit(0)
"""
_SHOWN = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", sys.prefix, sys.base_prefix)


def _wall() -> list[str]:
    """Return the beginning of a command that isolates the rest of it, or an empty list without bubblewrap."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return []
    shown = [word for path in dict.fromkeys(_SHOWN) for word in ("--ro-bind-try", path, path)]
    # /tmp comes first, because it may hold the interpreter.
    places = ["--tmpfs", "/tmp", *shown, "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp/run"]
    return [bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", *places, "--chdir", "/tmp/run", "--"]


@cache
def isolates() -> bool:
    """Return whether bubblewrap is installed and works. In many containers it does not work."""
    return bool(_wall()) and _passes("import ctypes, decimal, ssl", _wall())


def passes(program: str, **limits) -> bool:
    """Return whether `program` (Python source, tests included) runs to its end without an exception.

    Args:
        limits: `cpu_seconds` limits processor time, `wall_seconds` the whole time, sleep included, and `memory_bytes`
            the address space.
    """
    return _passes(program, _wall() if isolates() else [], **limits)


def _passes(
    program: str,
    wall: list[str],
    cpu_seconds: int = CPU_SECONDS,
    wall_seconds: int = WALL_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> bool:
    key = secrets.token_hex(16).encode()
    limits = {"CPU": cpu_seconds, "AS": memory_bytes, "FSIZE": FILE_BYTES, "CORE": 0}
    script = _SCRIPT.format(wall_seconds=wall_seconds, limits=limits, program=program, key=key)
    with (
        tempfile.TemporaryDirectory(prefix="run-code-", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryFile() as report,  # a pipe would hold what a program writes in this process's memory
    ):
        process = subprocess.Popen(
            [*wall, sys.executable, "-s", "-P", "-"],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=home,
            # The hash seed is fixed, so that a score does not depend on the order of a set.
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.communicate(script.encode("utf-8", "backslashreplace"), timeout=wall_seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        report.seek(0)
        return report.read(len(key) + 1) == key


def passes_each(programs: Sequence[str], **limits) -> list[bool]:
    """Return `passes` of each program, several at a time."""
    with ThreadPoolExecutor(max_workers=min(len(programs), os.cpu_count() or 1) or 1) as pool:
        return list(pool.map(lambda program: passes(program, **limits), programs))

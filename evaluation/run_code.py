"""Run programs that a model wrote, each in a Python process of its own with limits, never in the evaluating process.

A program gets an empty working directory, an empty environment, and limits on processor time, wall-clock time, address
space and the size of a file. Where bubblewrap (https://github.com/containers/bubblewrap) is installed and works, a
program also sees no network, no other process, and of the files only the interpreter, its packages and the system's
libraries, read-only. Without it a program can do what the user can: run the evaluation in a container.

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


FLAG = "--confirm-run-unsafe-code"  # lm-eval's
FLAG_HELP = "run programs that the model writes; without bubblewrap only the process's limits hold them"

CPU_SECONDS = 10
WALL_SECONDS = 60
MEMORY_BYTES = 2 * 2**30
FILE_BYTES = 2**20

# The key is written when the program has come to its end: neither sys.exit(0) nor os._exit(0) before the tests passes.
_SCRIPT = """
import os, resource, signal
signal.alarm({wall_seconds})  # if the evaluating process is killed, too
for name, limit in {limits}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
report, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
exec(compile({program!r}, "program.py", "exec"), {{}})  # as the benchmarks' own harnesses do: not as `__main__`
os.write(report, {key!r})
os._exit(0)
"""
_SHOWN = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", sys.prefix, sys.base_prefix)


def _wall() -> list[str]:
    """Return the command that walls off the command behind it; without bubblewrap an empty one."""
    if (bubblewrap := shutil.which("bwrap")) is None:
        return []
    shown = [word for path in dict.fromkeys(_SHOWN) for word in ("--ro-bind-try", path, path)]
    # /tmp first: it may hold the interpreter.
    places = ["--tmpfs", "/tmp", *shown, "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp/run"]
    return [bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", *places, "--chdir", "/tmp/run", "--"]


@cache
def isolates() -> bool:
    """Return whether bubblewrap is installed and works, which it does not in many containers."""
    return bool(_wall()) and _passes("import ctypes, decimal, ssl", _wall())


def passes(program: str, **limits) -> bool:
    """Return whether `program` (Python source, tests included) runs to its end without an exception.

    Args:
        limits: `cpu_seconds`, of processor time; `wall_seconds`, which bound its sleep; `memory_bytes`, of address
            space.
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
        tempfile.TemporaryFile() as report,  # no pipe: what a program writes there would fill this process's memory
    ):
        process = subprocess.Popen(
            [*wall, sys.executable, "-s", "-P", "-"],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=home,
            # A fixed hash seed, so that a score does not depend on the order of a set.
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

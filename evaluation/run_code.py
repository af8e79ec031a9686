"""Runs programs that a model wrote, each in a process of its own with limits, never in the evaluating process.

What is guaranteed on Linux: a fresh Python process with an empty environment and a temporary directory as its working
directory, which is removed afterwards; limits on CPU time, wall-clock time, address space and file size; the death of
everything in its session at the end. What Python code is kept from by an audit hook, which it cannot remove: sockets,
starting processes, signals, loading shared libraries by name, and changing files outside the temporary directory.
Where the system lets an ordinary user make a network namespace, there is no network for native code either
(`isolates_network` says so).

What is not: this is no sandbox against an attacker. Files that the user may read can be read, and native code that is
already loaded is bound by the limits and the namespace only. Run untrusted checkpoints in a container.
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


CPU_SECONDS = 10
WALL_SECONDS = 60
MEMORY_BYTES = 2 * 2**30
FILE_BYTES = 2**20

# Moves the process into a network namespace of its own, as a new user if need be, where the system allows it.
_LEAVE_NETWORK = """
import ctypes

NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000
try:
    unshare = ctypes.CDLL(None).unshare
    unshare(NEW_NETWORK) and unshare(NEW_USER | NEW_NETWORK)
except AttributeError:
    pass
"""

# Reads the secret and the program from stdin. The secret is written only once the program has ended normally, so that
# `sys.exit(0)` or `os._exit(0)` before the tests does not pass for success.
_CHILD = (
    f"""{_LEAVE_NETWORK}"""
    """
import os, resource, sys

report = os.dup(1)
secret, program = sys.stdin.buffer.readline().strip(), sys.stdin.buffer.read().decode()
nothing = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(nothing, descriptor)
cpu, memory, file_size, home = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), os.path.realpath(sys.argv[4])
for limit, value in (("CPU", cpu), ("AS", memory), ("FSIZE", file_size), ("CORE", 0), ("NPROC", 0), ("NOFILE", 64)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))

BLOCKED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
           "pty.", "signal.pthread_kill", "resource.", "ctypes.")
CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def inside(path, realpath=os.path.realpath, fsdecode=os.fsdecode):
    return isinstance(path, int) or (realpath(fsdecode(path)) + "/").startswith(home + "/")

def watch(event, arguments):
    if event.startswith(BLOCKED):
        raise PermissionError(event + " is not allowed here")
    if event == "open" and arguments[2] & WRITING and not inside(arguments[0]):
        raise PermissionError("writing outside the working directory is not allowed here")
    if event in CHANGES and not all(inside(path) for path in arguments[:2] if isinstance(path, (str, bytes))):
        raise PermissionError(event + " outside the working directory is not allowed here")

sys.addaudithook(watch)
try:
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
except BaseException:
    os._exit(1)
os.write(report, secret)
os._exit(0)
"""
)


@cache
def isolates_network() -> bool:
    """Whether the system lets this user cut a process off the network, native code included."""
    child = f"{_LEAVE_NETWORK}\nimport os; print(os.readlink('/proc/self/ns/net'))"
    process = subprocess.run([sys.executable, "-IS", "-c", child], capture_output=True, text=True)
    return process.returncode == 0 and process.stdout.strip() != os.readlink("/proc/self/ns/net")


def passes(
    program: str, cpu_seconds: int = CPU_SECONDS, wall_seconds: float = WALL_SECONDS, memory_bytes: int = MEMORY_BYTES
) -> bool:
    """Whether `program` (Python source, tests included) runs to its end without an exception.

    Args:
        cpu_seconds: CPU time after which the system kills it; sleeping is bound by `wall_seconds`.
        memory_bytes: of address space.
    """
    secret = secrets.token_hex(16).encode()
    with tempfile.TemporaryDirectory(prefix="run-code-", ignore_cleanup_errors=True) as home:
        limits = [str(cpu_seconds), str(memory_bytes), str(FILE_BYTES), home]
        process = subprocess.Popen(
            # No user site and no current directory on the path; a fixed hash seed, so that a score does not depend on
            # the order of a set.
            [sys.executable, "-s", "-P", "-c", _CHILD, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(
                secret + b"\n" + program.encode("utf-8", "surrogatepass"), timeout=wall_seconds
            )
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    return output == secret


def passes_each(programs: Sequence[str], **limits) -> list[bool]:
    """`passes` of each program, several at a time."""
    with ThreadPoolExecutor(max_workers=min(len(programs), os.cpu_count() or 1) or 1) as pool:
        return list(pool.map(lambda program: passes(program, **limits), programs))

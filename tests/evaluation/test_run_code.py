"""Test that programs run apart, behind the kernel's wall and within limits, and pass only by running to their end."""

import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from common.command_io import ROOT, UserError
from evaluation import run_code


isolated = pytest.mark.skipif(not run_code.isolates(), reason="the system makes no namespaces for this user")


@pytest.fixture(autouse=True)
def confirmed(monkeypatch):
    monkeypatch.setattr(run_code, "_confirmed", True)


PASSING = f"""
assert sum([1, 2]) == 3
print('x' * 100_000)
import os, sys
print('y', file=sys.stderr)
import numpy; assert numpy.arange(3).sum() == 3
assert os.listdir() == []
open('a', 'w').write('x'); assert open('a').read() == 'x'
assert set(os.environ) <= {{'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}}
assert sys.stdin.read() == ''
assert __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals()
import asyncio
async def f(): return 1
assert asyncio.run(f()) == 1
x = {"x" * 200_000!r}
y = bytearray(300 << 20)
"""
NEEDS_PROCESSES = """
from concurrent.futures import ThreadPoolExecutor as T
assert [*T(4).map(abs, [-1, -2])] == [1, 2]
import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)
import os; assert os.system('exit 0') == 0
import multiprocessing as m
def f(x): return -x
assert m.Pool(2).map(f, [1]) == [-1]
import tempfile; tempfile.TemporaryFile().write(b'x')
"""
FAILING = {
    "assertion": "assert sum([1, 2]) == 4",
    "syntax": "def f(:",
    "null": "a = 1\0",
    "surrogate": "a = '\ud800'",
    "exit before the tests": "import sys; sys.exit(0)\nassert False",
    "hard exit": "import os; os._exit(0)",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "recursion": "def f(): f()\nf()",
    "memory": "x = bytearray(8 << 30)",
    "large file": "open('a', 'wb').write(bytes(2 << 20))",
    "processor time": "while True: pass",
    "caught interrupts": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "the key": """
import os, sys
key = sys.modules['__main__'].secret
for descriptor in range(64):
    try: os.write(descriptor, key)
    except OSError: pass
os._exit(0)""",
}
# Each fails, or leaves alone what a test has outside: OUTSIDE is a directory with the file `kept`, PID this process.
ESCAPES = {
    "write": "open('OUTSIDE/new', 'w')",
    "read": "open('OUTSIDE/kept')",
    "remove": "import os; os.remove('OUTSIDE/kept')",
    "link": "import os; os.symlink('OUTSIDE/kept', 'link'); open('link', 'w')",
    "dir_fd": "import os; os.mkdir('OUTSIDE/new'[1:], dir_fd=os.open('/', os.O_RDONLY))",
    "sqlite": "import sqlite3; sqlite3.connect('OUTSIDE/new').execute('create table t (x)')",
    "mkfifo": "import os; os.mkfifo('OUTSIDE/new')",
    "packages": f"open({str(Path(sys.prefix) / 'planted')!r}, 'w')",
    "system": "open('/usr/planted', 'w')",
    "kernel": "open('/proc/sys/kernel/hostname', 'w').write('planted')",
    "signal": "import os; os.kill(PID, 0)",
    "pidfd": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(PID), 0)",
    "environment": "open('/proc/PID/environ')",
    "unmount": "import ctypes; assert ctypes.CDLL(None).umount2(b'/usr', 2) == 0",
    "remount": """
import ctypes
assert ctypes.CDLL(None).mount(None, b'/usr', None, 32 | 4096, None) == 0""",
    "namespaces again": """
import ctypes
assert ctypes.CDLL(None).unshare(0x10020000) == 0
assert ctypes.CDLL(None).mount(None, b'/usr', None, 32 | 4096, None) == 0""",
    "more memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "network": "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=5)",
    "devices": "import os; os.mknod('disk', 0o60600, os.makedev(259, 0))",
}


@pytest.mark.parametrize("program", [PASSING, pytest.param(NEEDS_PROCESSES, marks=isolated)], ids=["one", "several"])
def test_passes(program, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_code.passes(program)
    assert list(tmp_path.iterdir()) == []  # the working directory is removed


def test_fails():
    passed = run_code.passes_each([*FAILING.values(), "", "assert 0"], cpu_seconds=1)
    assert passed == [*[False] * len(FAILING), True, False]  # in order
    assert not run_code.passes(PASSING, memory_bytes=256 << 20)


def test_a_flood_of_the_report_ends_at_the_limit_of_a_file():
    flood = """
import os
for descriptor in range(3, 9):
    try:
        for _ in range(4000): os.write(descriptor, bytes(1 << 16))
    except OSError: pass"""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not run_code.passes(flood)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KiB


def test_wall_clock_ends_a_sleep():
    assert not run_code.passes("import time; time.sleep(3600)", wall_seconds=0.5)


@isolated
def test_nothing_outside_is_seen_or_changed(tmp_path):
    (tmp_path / "kept").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        programs = ESCAPES
        for word, value in {"OUTSIDE": tmp_path, "PID": os.getpid(), "PORT": server.getsockname()[1]}.items():
            programs = {name: program.replace(word, str(value)) for name, program in programs.items()}
        passed = run_code.passes_each(list(programs.values()))
    assert [name for name, escaped in zip(programs, passed) if escaped] == []
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "kept"


@isolated
def test_no_process_outlives_its_program():
    program = """
import os, sys
arguments = [sys.executable, '-c', 'import time; time.sleep(3600)', 'outlives-PID']
os.posix_spawn(sys.executable, [a.encode() for a in arguments], {}, setsid=True)
""".replace("PID", str(os.getpid()))
    assert run_code.passes(program)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            assert f"outlives-{os.getpid()}" not in path.read_text()


@pytest.mark.parametrize("wall", [pytest.param(True, marks=isolated), False])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_no_program_outlives_its_killed_evaluator(wall, tmp_path):
    begun = tmp_path / "begun"  # behind the wall it cannot be made, and three processes say the same
    program = f"import time\ntry: open({str(begun)!r}, 'w')\nexcept OSError: pass\ntime.sleep(50)"
    started = f"from evaluation import run_code; run_code._run({program!r}, {wall})"
    evaluator = subprocess.Popen([sys.executable, "-c", started], cwd=ROOT)

    def programs() -> list[int]:
        """Return the processes of this evaluator: run_program.py is told its number."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # the process has ended
                words = path.read_bytes().split(b"\0")
                found += [int(path.parent.name)] * (str(evaluator.pid).encode() in words)
        return found

    def wait_until(done) -> None:
        end = time.monotonic() + 30
        while not done():
            assert time.monotonic() < end, programs()
            time.sleep(0.05)

    wait_until(lambda: len(programs()) == 3 if wall else begun.exists())
    evaluator.kill()
    evaluator.wait()
    wait_until(lambda: not programs())


def test_without_isolation_the_user_has_to_confirm(monkeypatch):
    monkeypatch.setattr(run_code, "isolates", lambda: False)
    monkeypatch.setattr(run_code, "_confirmed", False)
    with pytest.raises(UserError, match="namespaces .* give --confirm-run-unsafe-code"):
        run_code.passes("")
    run_code.confirm_unsafe_code(True)
    assert run_code.passes("import asyncio\nasync def f(): pass\nasyncio.run(f())")
    assert not run_code.passes("import os; os._exit(0)")


def test_a_wall_that_fails_is_no_failure_of_the_program(tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f"#!/bin/sh\ncat > /dev/null; exit {run_code.NO_WALL}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(run_code, "isolates", lambda: True)
    with pytest.raises(UserError, match="refused the namespaces"):
        run_code.passes("")

"""Test that programs run apart, within limits and behind bubblewrap, and pass only by running to their end."""

import os
import socket
import sys
import tracemalloc
from pathlib import Path

import pytest

from evaluation import run_code


PASSING = f"""
assert sum([1, 2]) == 3
print('x' * 100_000)
import os, sys
print('y', file=sys.stderr)
import numpy; assert numpy.arange(3).sum() == 3
assert os.listdir() == []
open('a', 'w').write('x'); assert open('a').read() == 'x'
assert set(os.environ) <= {{'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE', 'PWD'}}
assert sys.stdin.read() == ''
assert __name__ != '__main__'
import asyncio
async def f(): return 1
assert asyncio.run(f()) == 1
import subprocess; subprocess.run([sys.executable, '-c', ''], check=True)
x = {"x" * 200_000!r}
y = bytearray(300 << 20)
"""
FAILING = {
    "assertion": "assert sum([1, 2]) == 4",
    "syntax": "def f(:",
    "null": "a = 1\0",
    "surrogate": "a = '\ud800'.encode()",
    "exit before the tests": "import sys; sys.exit(0)\nassert False",
    "hard exit": "import os; os._exit(0)",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "recursion": "def f(): f()\nf()",
    "memory": "x = bytearray(8 << 30)",
    "large file": "open('a', 'wb').write(bytes(2 << 20))",
    "processor time": "while True: pass",
    "caught interrupts": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
}
# Each fails behind bubblewrap: OUTSIDE is a directory with the file `kept`, PID this process.
ESCAPES = {
    "write": "open('OUTSIDE/new', 'w')",
    "read": "open('OUTSIDE/kept')",
    "packages": f"open({str(Path(sys.prefix) / 'planted')!r}, 'w')",
    "signal": "import os; os.kill(PID, 0)",
    "environment": "open('/proc/PID/environ')",
    "more memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "network": "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=5)",
}


def test_passes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_code.passes(PASSING)
    assert list(tmp_path.iterdir()) == []  # the working directory is removed


def test_fails():
    passed = run_code.passes_each([*FAILING.values(), "", "assert 0"], cpu_seconds=1)
    assert passed == [*[False] * len(FAILING), True, False]  # in order
    assert not run_code.passes(PASSING, memory_bytes=256 << 20)
    assert not run_code.passes("import time; time.sleep(3600)", wall_seconds=0.3)


def test_a_flood_of_the_report_ends_at_the_limit_of_a_file():
    flood = """
import os
for descriptor in range(3, 9):
    try:
        for _ in range(4000): os.write(descriptor, bytes(1 << 16))
    except OSError: pass"""
    tracemalloc.start()  # the process may have had a higher peak before
    try:
        assert not run_code.passes(flood)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not run_code.isolates(), reason="bubblewrap is not installed, or does not work here")
def test_nothing_outside_is_seen_or_changed_behind_bubblewrap(tmp_path):
    (tmp_path / "kept").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        programs = ESCAPES
        for word, value in {"OUTSIDE": tmp_path, "PID": os.getpid(), "PORT": server.getsockname()[1]}.items():
            programs = {name: program.replace(word, str(value)) for name, program in programs.items()}
        passed = run_code.passes_each(list(programs.values()))
    assert [name for name, escaped in zip(programs, passed) if escaped] == []
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "kept"


SKIP_OPTIONS = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'


@pytest.mark.parametrize(("body", "isolates"), [(SKIP_OPTIONS, True), ("exit 1", False)])
def test_bubblewrap_is_used_where_it_works(body, isolates, tmp_path, monkeypatch):
    """Put a script in the place of bubblewrap, which is installed on few machines."""
    begun = tmp_path / "begun"
    (tmp_path / "bwrap").write_text(f'#!/bin/sh\necho "$@" >> {begun}\n{body}\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run_code.isolates.cache_clear()
    assert run_code.isolates() == isolates and run_code.passes("assert True") and not run_code.passes("assert False")
    calls = begun.read_text().splitlines()
    assert len(calls) == (3 if isolates else 1) and all("--unshare-all --die-with-parent" in call for call in calls)
    for call in calls:
        options = call.partition(" -- ")[0].split()
        shown = [options[place + 1] for place, option in enumerate(options) if option == "--ro-bind-try"]
        assert shown == [*dict.fromkeys(run_code._SHOWN)]
        assert {option for option in options if "bind" in option or "share" in option} == {
            "--ro-bind-try",
            "--unshare-all",
        }
        assert call.index("--tmpfs /tmp") < call.index("--ro-bind-try")
    run_code.isolates.cache_clear()

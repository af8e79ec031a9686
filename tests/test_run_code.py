"""Programs that a model wrote run apart, within limits, and pass only by running to their end."""

import os
import subprocess

import pytest

from evaluation import run_code


PASSING = {
    "nothing": "",
    "assertion": "assert sum([1, 2]) == 3",
    "output": "print('x' * 100_000)\nimport sys; print('y', file=sys.stderr)",
    "numpy": "import numpy; assert numpy.arange(3).sum() == 3",
    "own file": "open('a', 'w').write('x'); assert open('a').read() == 'x'",
    "no environment": "import os; assert set(os.environ) <= {'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}",
    "no input": "import sys; assert sys.stdin.read() == ''",
    "main": "assert __name__ == '__main__'",
}
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
    "socket": "import socket; socket.socket()",
    "process": "import subprocess; subprocess.run(['true'])",
    "shell": "import os; os.system('true')",
    "fork": "import os; os.fork()",
    "signal to the parent": "import os; os.kill(os.getppid(), 0)",
    "native library": "import ctypes; ctypes.CDLL('libc.so.6')",
    "more memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
}


@pytest.mark.parametrize("program", PASSING.values(), ids=PASSING)
def test_passes(program):
    assert run_code.passes(program)


@pytest.mark.parametrize("program", FAILING.values(), ids=FAILING)
def test_fails(program):
    assert not run_code.passes(program, cpu_seconds=1)


def test_wall_clock_ends_a_sleep():
    assert not run_code.passes("import time; time.sleep(3600)", wall_seconds=0.5)


def test_nothing_outside_the_working_directory_changes(tmp_path):
    (tmp_path / "kept").write_text("kept")
    for change in (
        f"open('{tmp_path}/new', 'w')",
        f"import os; os.remove('{tmp_path}/kept')",
        f"import os; os.rename('{tmp_path}/kept', 'mine')",
        f"import shutil; shutil.rmtree('{tmp_path}')",
        f"import os; os.symlink('{tmp_path}/kept', 'link'); open('link', 'w')",
        f"import pathlib; pathlib.Path('../{tmp_path.name}').mkdir(exist_ok=True); pathlib.Path('{tmp_path}/new').touch()",
    ):
        assert not run_code.passes(change), change
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "kept"


def test_the_working_directory_is_new_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_code.passes("import os; assert os.listdir() == []; open('a', 'w')")
    assert list(tmp_path.iterdir()) == []


def test_memory_is_limited():
    program = "x = bytearray(300 << 20)"
    assert run_code.passes(program) and not run_code.passes(program, memory_bytes=256 << 20)


def allows_namespaces():
    try:
        return subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not allows_namespaces(), reason="the system makes no network namespaces for this user")
def test_a_namespace_without_network():
    assert run_code.isolates_network()
    program = f"import os; assert os.readlink('/proc/self/ns/net') != {os.readlink('/proc/self/ns/net')!r}"
    assert run_code.passes(program)


def test_several_at_a_time_in_order():
    assert run_code.passes_each(["assert 0", "", "assert 0", ""]) == [False, True, False, True]
    assert run_code.passes_each([]) == []

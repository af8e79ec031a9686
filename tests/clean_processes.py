"""Fork clean processes from one parent, which has imported Transformers and cannot import this package.

A new process imports PyTorch and Transformers for seconds. Here a parent in an isolated Python does so once, and each
program runs in a fork of it, with a home and caches that are empty again. Every program begins with what the parent
has imported: Transformers' Auto classes and PEFT. Tests that need an interpreter without them take the fixture
`new_processes`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


PARENT = """
import gc, json, os, sys

gc.disable()
sys.path += [path for path in json.loads(sys.stdin.readline()) if path not in sys.path]
sys.modules["bitsandbytes"] = None  # PEFT would import it, and it Inductor, for seconds
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
import transformers.generation, transformers.modeling_utils
import peft  # as interleaved models do, which watch it

assert "modeling_iha" not in sys.modules
for line in sys.stdin:
    call = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(call["directory"])
    for number, name, flags in ((0, "given", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "error", os.O_WRONLY)):
        os.dup2(os.open(call[name], flags), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    exec(compile(call["program"], "<string>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(0)  # a normal end would free what the parent has imported, page by page
"""


class Forking:
    """Run programs in forks of one parent. Where an environment differs from the first one, start a new process."""

    def __init__(self, start: Callable[..., subprocess.CompletedProcess], home: Path):
        self.start_anew = start
        self.is_off = False
        self.home = str(home)
        self.environment: dict[str, str] = {}
        self.parent: subprocess.Popen | None = None

    def start(self, program: str, given: str, directory: str, environment: dict[str, str]):
        """Take the arguments of `iha.processes._start`, and return what it does."""
        own = {name: value.replace(directory, self.home) for name, value in environment.items()}
        if self.parent is None and not self.is_off:
            self._import(own)
        if self.is_off or own != self.environment:
            return self.start_anew(program, given, directory, environment)
        with tempfile.TemporaryDirectory() as place:
            files = {name: Path(place, name) for name in ("given", "out", "error")}
            for name, path in files.items():
                path.write_text(given if name == "given" else "", encoding="utf-8")
            self._tell({"program": program, "directory": directory, **{name: str(files[name]) for name in files}})
            code = int(self.parent.stdout.readline())
            out, error = (files[name].read_text(encoding="utf-8") for name in ("out", "error"))
        for each in Path(self.home).iterdir():  # the caches are empty again
            shutil.rmtree(each)
        return subprocess.CompletedProcess([], code, out, error)

    def _import(self, environment: dict[str, str]) -> None:
        """Start the parent."""
        from iha.processes import library_paths  # which imports Transformers: see conftest.py

        self.environment = environment
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [sys.executable, "-I", "-c", PARENT]
        self.parent = subprocess.Popen(command, **pipes, text=True, cwd=self.home, env=environment)
        self._tell(library_paths())

    def _tell(self, message: object) -> None:
        print(json.dumps(message), file=self.parent.stdin, flush=True)

    def stop(self) -> None:
        """End the parent."""
        if self.parent is not None:
            self.parent.stdin.close()
            self.parent.wait(30)

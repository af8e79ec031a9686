"""Change one operator, constant or pair of arguments of a room at random, and see whether its tests fail.

    python -m tests.mutants --count 40 --seed 0
    python -m tests.mutants hub common --tests tests/hub tests/test_faults.py

The changed copy of the repository lies in a temporary directory. The results keep every verdict, and a second start
goes on from there. Each run of the tests is a fork of this process, which has imported PyTorch once. The first run of
a start has no change and records which lines each test runs in its own process: later runs make the tests that run
the changed line.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.command_io import ROOT, read_json, write_json


TESTS = (
    *("config", "choose_form", "window_blocks", "dcmha", "hyper_feature", "diff"),
    *("multi_token", "mechanisms", "reference", "hyper", "numerics", "generation", "packing", "masks"),
    *("companions", "continuous_batching", "cost"),
)
OPERATORS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
}
CONSTANTS = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: 2 * value + 0.5}


def mutate(node: ast.AST) -> bool:
    """Change one thing of the node in place, and return False if there is nothing to change."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in OPERATORS:
            node.ops = [OPERATORS[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPERATORS:
            node.op = OPERATORS[type(operator)]()
        case ast.UnaryOp(op=ast.Not()):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
        case ast.Constant(value=value) if type(value) in CONSTANTS:
            node.value = CONSTANTS[type(value)](value)
        case ast.Call(args=[ast.Name() as first, ast.Name() as second, *others]):
            node.args = [second, first, *others]
        case _:
            return False
    return True


def mutants_of(path: Path, root: Path) -> dict[str, tuple[Path, int, int]]:
    """Return path, number of the node and its line, by a description, for every mutant of a file."""
    mutants = {}
    for number, node in enumerate(ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        before = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if mutate(node) and (after := ast.unparse(node)) != before:
            mutants[f"{path.relative_to(root)}:{node.lineno}:{node.col_offset}: {before}  ->  {after}"] = (
                path,
                number,
                node.lineno,
            )
    return mutants


def text_of(path: Path, number: int) -> str:
    """Return the text of a file whose node of this number is changed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mutate(list(ast.walk(tree))[number])
    return ast.unparse(tree)


class Recorder:
    """Write the seconds of each test, and the lines of the rooms that it runs.

    `output` becomes JSON: by the id of a test, "seconds" and "lines", the numbers of lines by the path of a file.
    """

    def __init__(self, rooms: list[Path], output: Path):
        from coverage import Coverage

        self.output, self.tests = output, {}
        self.coverage = Coverage(data_file=None, source=[str(room) for room in rooms])
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid):
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report):
        self.tests.setdefault(report.nodeid, {"seconds": 0.0, "lines": {}})["seconds"] += report.duration

    def pytest_sessionfinish(self, exitstatus):
        self.coverage.stop()
        if exitstatus:
            return
        data = self.coverage.get_data()
        for file in data.measured_files():
            for line, nodeids in data.contexts_by_lineno(file).items():
                for nodeid in self.tests.keys() & nodeids:
                    self.tests[nodeid]["lines"].setdefault(file, []).append(line)
        self.output.write_text(json.dumps(self.tests), encoding="utf-8")


class Selection:
    """Keep the given tests, the quickest first."""

    def __init__(self, tests: dict[str, float]):
        self.seconds = tests

    def pytest_collection_modifyitems(self, items):
        chosen = [item for item in items if item.nodeid in self.seconds]
        items[:] = sorted(chosen, key=lambda item: self.seconds[item.nodeid])


def tests_of(tests: dict, file: str, line: int) -> dict[str, float]:
    """Return the seconds of the tests that run a line; where none does, of those of its file: it may run at import."""
    run_file = {key: test for key, test in tests.items() if file in test["lines"]} or tests
    run_line = {key: test for key, test in run_file.items() if line in test["lines"].get(file, ())}
    return {key: test["seconds"] for key, test in (run_line or run_file).items()}


def run_tests(copy: Path, log: Path, tests: list[str], make_plugin: Callable) -> None:
    """Run the tests of the copy up to the first failure, with their output in the log, and exit."""
    for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
        del sys.modules[name]  # The copy's are to be imported.
    import pytest

    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:warnings"]
    os._exit(pytest.main([*options, *tests], [make_plugin()]))


def killer(copy: Path, timeout: float, tests: list[str], make_plugin: Callable) -> str | None:
    """Return the test of the copy that fails, None if all pass; a plugin of pytest sees or selects the tests."""
    log = copy.with_name("log")
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, log, tests, make_plugin))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        return f"no result after {timeout:.0f} s"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or [f"exit code {process.exitcode}"])[0][:200] if process.exitcode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", default=["modeling_iha"], help="folders whose files are changed")
    tests = [f"tests/modeling/test_{name}.py" for name in TESTS]
    parser.add_argument("--tests", nargs="+", default=tests, help="files or folders; by default those of modeling_iha")
    parser.add_argument(
        "--count", type=int, default=40, help="mutants of a room; more of them begin with the same ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one mutant; thrice for the first run")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "mutants.json")
    arguments = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"
    # A file that is changed twice in a second would be taken from the bytecode of the first change.
    sys.dont_write_bytecode = True
    import peft  # noqa: F401  # and with it PyTorch and Transformers, once for all forks

    with tempfile.TemporaryDirectory() as directory:
        copy, mutants = Path(directory) / "copy", {}
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "outputs", "__pycache__"))
        sys.path.insert(0, str(copy))
        killers = read_json(arguments.output)["killers"] if arguments.output.exists() else {}
        names = []
        for room in arguments.rooms:
            of_room = {}
            for path in sorted((copy / room).glob("*.py")):
                of_room |= mutants_of(path, copy)
            if not of_room:
                parser.error(f"{room} has no Python file to change; name a folder such as modeling_iha")
            shuffled = sorted(of_room)
            random.Random(arguments.seed).shuffle(shuffled)
            names += shuffled[: arguments.count]
            mutants |= of_room
        remaining = [name for name in names if name not in killers]
        recorded = Path(directory) / "lines.json"
        record = partial(Recorder, [copy / room for room in arguments.rooms], recorded)
        if remaining and (failed := killer(copy, 3 * arguments.timeout, arguments.tests, record)):
            sys.exit(f"Error: the tests fail without any change: {failed}")
        tests = read_json(recorded) if remaining else {}
        for name in remaining:
            start, (path, number, line) = time.monotonic(), mutants[name]
            original = path.read_text(encoding="utf-8")
            path.write_text(text_of(path, number), encoding="utf-8")
            selected = tests_of(tests, str(path), line)
            files = sorted({key.partition("::")[0] for key in selected})
            killers[name] = killer(copy, arguments.timeout, files, partial(Selection, selected))
            path.write_text(original, encoding="utf-8")
            survivors = [name for name in killers if killers[name] is None]
            write_json(arguments.output, {"survivors": survivors, "killers": killers})
            verdict = "survives" if killers[name] is None else "killed  "
            print(f"{verdict} {time.monotonic() - start:4.0f} s  {name}", flush=True)
    print(f"{sum(killers[name] is None for name in names)} of {len(names)} mutants survive")


if __name__ == "__main__":
    main()

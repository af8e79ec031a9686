"""Change one operator, constant or pair of arguments of the model at random, and see whether its tests fail.

    python -m tests.mutants --count 40 --seed 0

The changed copy of the repository lies in a temporary directory. The results keep every verdict, and a second start
goes on from there. Each run of the tests is a fork of this process, which has imported PyTorch once. The first run of
a start has no change and records which lines each test runs: later runs make the tests that run the changed line.
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

from common.command_io import ROOT


# The first failure ends the run of a mutant, so the files that find most in a second come first.
TESTS = (
    *("config", "choose_form", "window_blocks", "dcmha", "hyper_feature", "diff", "talking_heads", "knocking_heads"),
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


def mutants_of(path: Path) -> dict[str, tuple[Path, int, int]]:
    """Return path, number of the node and its line, by a description, for every mutant of a file."""
    mutants = {}
    for number, node in enumerate(ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        before = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if mutate(node) and (after := ast.unparse(node)) != before:
            mutants[f"{path.name}:{node.lineno}:{node.col_offset}: {before}  ->  {after}"] = (
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
    """Write the seconds of each test, and the lines of the model that it runs.

    `output` becomes JSON: by the id of a test, "seconds" and "lines", the numbers of lines by the name of a file.
    """

    def __init__(self, package: Path, output: Path):
        from coverage import Coverage

        self.output, self.tests = output, {}
        self.coverage = Coverage(data_file=None, source=[str(package)])
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
                    self.tests[nodeid]["lines"].setdefault(Path(file).name, []).append(line)
        self.output.write_text(json.dumps(self.tests), encoding="utf-8")


class Selection:
    """Keep the tests that run a changed line, the quickest first, or all where none does: it may run at import."""

    def __init__(self, tests: dict, name: str, line: int):
        self.seconds = {key: test["seconds"] for key, test in tests.items() if line in test["lines"].get(name, ())}

    def pytest_collection_modifyitems(self, items):
        run_it = [item for item in items if item.nodeid in self.seconds]
        items[:] = sorted(run_it, key=lambda item: self.seconds[item.nodeid]) or items


def run_tests(copy: Path, log: Path, make_plugin: Callable) -> None:
    """Run the tests of the copy up to the first failure, with their output in the log, and exit."""
    import pytest

    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    tests = [f"tests/modeling/test_{name}.py" for name in TESTS]
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:warnings"]
    os._exit(pytest.main([*options, *tests], [make_plugin()]))


def killer(copy: Path, timeout: float, make_plugin: Callable) -> str | None:
    """Return the test of the copy that fails, None if all pass; a plugin of pytest sees or selects the tests."""
    log = copy.with_name("log")
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, log, make_plugin))
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
    parser.add_argument("--count", type=int, default=40, help="mutants; more of them begin with the same ones")
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
        # The copy's, because the forks that test the copy keep what is imported here.
        sys.path.insert(0, str(copy))
        from common.command_io import read_json, write_json

        killers = read_json(arguments.output)["killers"] if arguments.output.exists() else {}
        for path in sorted((copy / "modeling_iha").glob("*.py")):
            mutants |= mutants_of(path)
        names = sorted(mutants)
        random.Random(arguments.seed).shuffle(names)
        names = names[: arguments.count]
        remaining = [name for name in names if name not in killers]
        recorded = Path(directory) / "lines.json"
        record = partial(Recorder, copy / "modeling_iha", recorded)
        if remaining and (failed := killer(copy, 3 * arguments.timeout, record)):
            sys.exit(f"Error: the tests fail without any change: {failed}")
        tests = read_json(recorded) if remaining else {}
        for name in remaining:
            start, (path, number, line) = time.monotonic(), mutants[name]
            original = path.read_text(encoding="utf-8")
            path.write_text(text_of(path, number), encoding="utf-8")
            killers[name] = killer(copy, arguments.timeout, partial(Selection, tests, path.name, line))
            path.write_text(original, encoding="utf-8")
            survivors = [name for name in killers if killers[name] is None]
            write_json(arguments.output, {"survivors": survivors, "killers": killers})
            verdict = "survives" if killers[name] is None else "killed  "
            print(f"{verdict} {time.monotonic() - start:4.0f} s  {name}", flush=True)
    print(f"{sum(killers[name] is None for name in names)} of {len(names)} mutants survive")


if __name__ == "__main__":
    main()

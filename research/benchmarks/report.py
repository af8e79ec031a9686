"""Write research/benchmarks/results/README.md, a page for each GPU, and plots, from the JSON files next to them.

A JSON file holds rows. A row holds its setting and, by name, "seconds", "extra_bytes" if they were measured, "ratios",
and the same ratios as "predicted" by the cost model, if it predicts them. A table has a line for each ratio and a
column for each setting; where settings are left together, it says the lowest and the highest.

example: python -m research.benchmarks.report
"""

import argparse
import subprocess
from pathlib import Path

from matplotlib.figure import Figure

from iha import plots
from iha.errors import ROOT, UserError, run_cli
from iha.files import expanded, read_json, whole_file
from research.benchmarks.options import RESULTS


PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument(
    "--out", type=expanded, default=RESULTS, help="directory of the results (research/benchmarks/results)"
)

ABOUT = """# Benchmarks

A time is the ratio of the medians of interleaved runs in one process. A memory is the ratio of two
peaks, each measured in a separate process. Below 1 the first takes less. The longest ones are
timed once, without a warm-up: prefill beyond 16,384 tokens and the backward pass of schedule beyond
4,096. The JSON files hold seconds, bytes, threads and what the cost model predicts. `python -m
research.benchmarks.report` writes this page from them, and `make bench` measures all of them again.
[GPUs have their own pages](gpu/README.md)."""
# So many changed files of the model a page names, and more it counts.
FEW = 5
# Benchmark -> the fields that tell its columns apart; by default all of a setting.
COLUMNS = {"any_decoder": ("pass", "window"), "obvious": ("pass", "window", "tokens")}
# Presets by the names that a plot gives them and the schedules.
GPU_FORMS = {"global-local": "windows alone", "paired-heads": "paired heads"}
GPU_FORMS |= {f"iha, P = {virtual}": f"schedule, P = {virtual}" for virtual in (2, 4, 20)}
GPU_CELLS = """A cell has the milliseconds, in brackets their ratio to those of the first line, and the peak of
memory in GB."""
# A cell may also have these figures, by their names in a row.
GPU_NOTES = {
    "predicted ratios": "predicted ratio {:.2f}".format,
    "predicted seconds": lambda seconds: f"predicted {1000 * seconds:.3f} ms",
    "bound seconds": lambda seconds: f"at full bandwidth {1000 * seconds:.3f} ms",
    "error": "error {:.1e}".format,
}
DEFAULT = """## default_form
The default of an "iha" layer over SDPA on the virtual sequence under a dense mask: the lowest and
the highest of all dtypes and numbers of threads. [Figures](default_form): `python -m
research.benchmarks.default_form --out research/benchmarks/results`."""


def table(header: list[str], lines: dict[str, list[str]]) -> list[str]:
    rows = [header, *([name, *cells] for name, cells in lines.items())]
    first, *others = (f"| {' | '.join(cells)} |" for cells in rows)
    return [first, "|" + "---|" * len(header), *others]


def span(values: list[float]) -> str:
    """Return the lowest and the highest of some ratios, or the only one."""
    ends = sorted({f"{min(values):.3f}", f"{max(values):.3f}"}, key=float) if values else []
    return "–".join(ends)


def setting_of(row: dict, fields: tuple[str, ...]) -> str:
    """Return the values of some fields as text; those of other fields than these speak for themselves."""
    words = {
        "tokens": "{} tokens",
        "pseudo_heads": "P = {}",
        "window": "window: {}",
        "requests": "requests: {}",
        "padding": "padding {}",
    }
    return ", ".join(words.get(field, "{}").format(row[field]) for field in fields if row[field] is not None)


def ratios_of(name: str, result: dict) -> tuple[str, list[str], dict[str, list[list[float]]]]:
    """Return what all ratios are over (else ""), the settings, and the ratios in each setting by their name."""
    values: dict[str, dict[str, list[float]]] = {}
    columns: dict[str, None] = {}
    for row in result["rows"]:
        fields = tuple(key for key, value in row.items() if not isinstance(value, dict))
        setting = setting_of(row, COLUMNS.get(name, fields))
        for ratio, value in row["ratios"].items():
            kind, _, rest = ratio.rpartition("memory: ")
            column = f"memory, {setting}" if rest != ratio else setting
            columns[column] = None
            values.setdefault(kind + rest, {}).setdefault(column, []).append(value)
    bases = {ratio.partition(" / ")[2] for ratio in values}
    base = bases.pop() if len(bases) == 1 else ""
    found = {ratio: [of_ratio.get(column, []) for column in columns] for ratio, of_ratio in values.items()}
    return base, list(columns), {ratio.removesuffix(f" / {base}"): lists for ratio, lists in found.items()}


def commit_of(result: dict) -> str:
    """Return which commit a table measured, as far as it says, and which files of the model have changed since."""
    if result.get("commit", "unknown") == "unknown":
        return "commit not recorded"
    commit = result["commit"].removesuffix("-dirty")
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit, "HEAD", "--", "modeling_iha"]
    try:
        changed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):  # there is no git, or no such commit
        since = " (which this copy lacks: not compared)"
    else:
        named = ", ".join(Path(path).name for path in changed)
        where = f": {named}" if len(changed) <= FEW else f" in {len(changed)} files"
        since = f" (`modeling_iha` has changed since{where})" if changed else ""
    dirty = " with local changes" if result["commit"].endswith("-dirty") else ""
    return f"commit {commit[:7]}{dirty}{since}"


def benchmark_lines(name: str, result: dict) -> list[str]:
    """Return the section of a benchmark: how it was measured, its ratios, and their plot."""
    base, columns, found = ratios_of(name, result)
    lines = {ratio: [span(values) for values in lists] for ratio, lists in found.items()}
    return [
        f"## {name}",
        f"[Figures]({name}.json): `{result['command']}`, {commit_of(result)}",
        "",
        *table([f"/ {base}" if base else "", *columns], lines),
        "",
        f"![Ratios of {name}]({name}.png)",
    ]


def spread(values: list[float]) -> plots.Point | None:
    """Return the mean of some ratios, and how far they go below and above it."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return mean, mean - min(values), max(values) - mean


def plot(name: str, result: dict) -> Figure:
    """Plot each ratio as a dot for each setting, from the lowest to the highest."""
    base, columns, found = ratios_of(name, result)
    points = {column: [spread(lists[place]) for lists in found.values()] for place, column in enumerate(columns)}
    figure, (axes,) = plots.panels(f"{name}: below 1 the first takes less", height=1 + 0.45 * len(found))
    plots.dots(axes, list(found), points, mark=1)
    axes.set(xlabel=f"ratio to {base}" if base else "ratio", xscale="log")
    return figure


def measured_on(result: dict) -> str:
    """Return the machine and the versions of a table."""
    return ", ".join([result["machine"], *(f"{package} {result[package]}" for package in ("torch", "transformers"))])


def default_lines(results: list[dict]) -> list[str]:
    """Return the default of an "iha" layer over SDPA on each CPU, idle and next to busy processes."""
    columns = {
        f"CPU {number}, {name}": [row for row in result["rows"] if (row["busy"] > 0) == busy]
        for number, result in enumerate(results, 1)
        for name, busy in (("idle", False), ("busy", True))
    }
    machines = [f"CPU {number}: {result['machine']}; {commit_of(result)}." for number, result in enumerate(results, 1)]
    fields = ("pass", "tokens", "pseudo_heads", "window")
    settings = dict.fromkeys(setting_of(row, fields) for rows in columns.values() for row in rows)
    lines = {
        setting: [
            span([ratio for row in rows if setting_of(row, fields) == setting for ratio in row["ratios"].values()])
            for rows in columns.values()
        ]
        for setting in settings
    }
    return [DEFAULT, *machines, "", *table(["", *columns], lines)]


def render(results: dict[str, dict], defaults: list[dict]) -> str:
    """Return the README as Markdown, from the results by name and those of default_form on each CPU."""
    about = f"{ABOUT}\nMeasured on: {'; '.join(dict.fromkeys(map(measured_on, results.values())))}."
    sections = [benchmark_lines(name, result) for name, result in results.items()]
    return "\n\n".join([about, *("\n".join(section) for section in [default_lines(defaults), *sections])]) + "\n"


def gpu_setting(row: dict) -> str:
    """Return the sizes and the pass of a row that a GPU measured."""
    words = []
    if "family" in row:
        words.append(row["family"])
    words.append(f"{row['tokens']:,} tokens")
    if "step" in row:
        words.append(f"{row['step']} with P = {row['pseudo_heads'][0]}")
    if "layers" in row:
        words.append(f"{row['layers']} layers")
    if "batch" in row:
        words.append(f"batch of {row['batch']}")
    if row.get("checkpointing"):
        words.append("checkpointed")
    if "backward" in row:
        words.append("forward and backward" if row["backward"] else "forward")
    return ", ".join(words)


def gpu_cells(row: dict) -> dict[str, str]:
    """Return by form its milliseconds, their ratio to those of the first form, and its GB, or why it failed.

    Predictions and errors follow if the row has them."""
    digits = 3 if row["part"] == "expand" else 1  # which takes microseconds
    cells = {}
    for form, seconds in row["seconds"].items():
        ratio = f"{row['ratios'][form]:.2f}" if form in row["ratios"] else "–"  # there is no time of the base
        cell = f"{1000 * seconds:.{digits}f} ({ratio})"
        if form in row.get("peak_bytes", {}):
            cell += f", {row['peak_bytes'][form] / 1e9:.1f}"
        for name, shown in GPU_NOTES.items():
            if form in row.get(name, {}):
                cell += "; " + shown(row[name][form])
        cells[form] = cell
    return cells | {form: f"failed: {error.split('.')[0]}" for form, error in row["failed"].items()}


def gpu_lines(result: dict) -> list[str]:
    """Return the page of a GPU: a table for each part and commit, with a line for each form."""
    about = f"{result['device']}, torch {result['torch']}, transformers {result['transformers']}, bfloat16."
    lines = [f"# {result['device']}", f"{about} [Figures](gpu.json); [what is measured](../README.md).", "", GPU_CELLS]
    lines += ["", "![Ratios to the first form of each row](gpu.png)"]
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in result["rows"]:
        groups.setdefault((row["part"], commit_of(row)), []).append(row)
    for (part, commit), rows in groups.items():
        columns = [gpu_cells(row) for row in rows]
        forms = dict.fromkeys(form for cells in columns for form in cells)
        lines += ["", f"## {part}", f"{commit[0].upper()}{commit[1:]}.", ""]
        header = ["", *map(gpu_setting, rows)]
        lines += table(header, {form: [cells.get(form, "") for cells in columns] for form in forms})
    return lines


def short_form(form: str) -> str:
    """Return the name of a form in plots."""
    name = form.replace(": sdpa", "")
    return GPU_FORMS.get(name, name)


def gpu_place(row: dict) -> str:
    """Return the name of a row in plots."""
    return gpu_setting(row) if "step" in row else f"{row['part']}, {gpu_setting(row)}"


def gpu_plot(result: dict) -> Figure:
    """Plot the ratios of each row to its first form: a dot for each form, hollow for code without the kernels.

    The steps around attention have a panel of their own. Recomputed and checkpointed forms are in the table only."""
    message = f"{result['device']}: time over that of the first form of each row (hollow: without Triton's kernels)"
    shown = [row for row in result["rows"] if row["ratios"]]
    parts = [[row for row in shown if ("step" in row) == is_step] for is_step in (False, True)]
    parts = [rows for rows in parts if rows]
    figure, panels = plots.panels(message, len(parts), height=0.8 + 0.25 * max(map(len, parts)))
    colors: dict[str, str] = {}
    for axes, rows in zip(panels, parts):
        for place, row in enumerate(rows):
            base = row.get("base", next(iter(row["ratios"])))  # older tables begin with it
            for form, ratio in row["ratios"].items():
                name = short_form(form.removesuffix(", without kernels"))
                if form == base or "recomputed" in form or "checkpointed" in form:
                    continue
                style = {"color": colors.setdefault(name, f"C{len(colors)}"), "markersize": 6}
                is_plain = "without kernels" in form
                axes.plot(ratio, place, "o", fillstyle="none" if is_plain else "full", label=name, **style)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(rows)), [gpu_place(row) for row in rows], fontsize="small")
        axes.set(xlabel="ratio", xscale="log", ylim=(len(rows) - 0.4, -0.6))
        axes.grid(linewidth=0.3)
    return figure


def main() -> None:
    """Write the pages and plots of a directory of tables. Raise `UserError` for a directory without any."""
    args = PARSER.parse_args()
    if not any(args.out.glob("*.json")) and not any(args.out.glob("gpu/*/gpu.json")):
        raise UserError(f"{args.out} holds no table of a benchmark: name the --out of the benchmarks.")
    for path in sorted(args.out.glob("gpu/*/gpu.json")):
        result = read_json(path)
        plots.save_plot(gpu_plot(result), path.with_suffix(".png"))
        with whole_file(path.with_name("README.md")) as page:
            page.write_text("\n".join(gpu_lines(result)) + "\n", encoding="utf-8")
    results = {path.stem: read_json(path) for path in sorted(args.out.glob("*.json"))}
    if strangers := [name for name, result in results.items() if "rows" not in result]:
        raise UserError(
            f"{args.out / strangers[0]}.json is no table of a benchmark: name the --out of the benchmarks."
        )
    defaults = [read_json(path) for path in sorted(args.out.glob("default_form/*.json"))]
    for name, result in results.items():
        plots.save_plot(plot(name, result), args.out / f"{name}.png")
    with whole_file(args.out / "README.md") as path:
        path.write_text(render(results, defaults), encoding="utf-8")
    print(f"Wrote {args.out / 'README.md'}")


if __name__ == "__main__":
    run_cli(main)

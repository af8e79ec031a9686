"""Print how the evaluation of a checkpoint differs from that of another one, example by example.

Read two output directories of evaluation.run. The table has the figures of both, their difference with its standard
error over the same examples, and how many examples have another reply.

example: python -m evaluation.compare outputs/evaluation/smollm2 outputs/evaluation/smollm2-iha
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from iha.cards import figure_text, is_share, markdown_table
from iha.errors import UserError, run_cli
from iha.files import expanded, read_json, read_jsonl


# Settings of a task that evaluations must have in common. The hash covers its shots.
SETTINGS = ("task_hash", "samples_each", "generation", "chat")
# Facts of a run that may change its figures a little: the comparison names those that differ.
FACTS = ("device", "versions", "batch_size")


def compare(before: Path, after: Path) -> str:
    """Return the comparison of two output directories as Markdown.

    Raise `UserError` if they have no task in common, or if the examples or settings of a task differ.
    """
    runs = [read_json(directory / "results.json") for directory in (before, after)]
    first, second = (run["tasks"] for run in runs)
    common = [task for task in first if task in second]
    if not common:
        raise UserError(f"{before} and {after} have no task in common.")
    notes = [f"{after} had another {fact} than {before}." for fact in FACTS if runs[0].get(fact) != runs[1].get(fact)]
    rows = []
    for task in common:
        for setting in SETTINGS:
            if first[task][setting] != second[task][setting]:
                raise UserError(f"{task} has another {setting} in {after} than in {before}: evaluate both alike.")
        pairs = paired_samples(task, before, after)
        # Chat templates and tokenizers write one example in several ways.
        if any(old.get("prompt_hash") != new.get("prompt_hash") for old, new in pairs):
            notes.append(f"{task} had other prompts in {after} than in {before}.")
        changed = sum(old["replies"] != new["replies"] for old, new in pairs if "replies" in old)
        replies = str(changed) if "replies" in pairs[0][0] else "–"
        for metric in first[task]["metrics"]:
            if metric not in second[task]["metrics"]:
                continue
            figures = [run[task]["metrics"][metric] for run in (first, second)]
            figures.append(mean_difference([(old.get(metric), new.get(metric)) for old, new in pairs]))
            cells = [figure_text(figure, percent=is_share(metric)) for figure in figures]
            rows.append([task, metric, str(len(pairs)), *cells, replies])
    header = ["task", "metric", "examples", str(before), str(after), "difference", "other replies"]
    explained = "± is the standard error over the examples; for a difference, over the same examples."
    return "\n\n".join([*notes, explained, markdown_table(header, rows)])


def paired_samples(task: str, before: Path, after: Path) -> list[tuple[dict, dict]]:
    """Return the samples of a task in two output directories, by example. Raise `UserError` for other examples."""
    old, new = (
        {(row["doc_id"], row["doc_hash"]): row for row in read_jsonl(directory / f"samples_{task}.jsonl")}
        for directory in (before, after)
    )
    if old.keys() != new.keys():
        raise UserError(
            f"{task} has other examples in {after} than in {before}: give both one --limit and one --data. RULER's "
            "examples depend on --seed and on the tokenizer, too."
        )
    return [(row, new[key]) for key, row in old.items()]


def mean_difference(pairs: list[tuple]) -> dict | None:
    """Return the mean of the differences, {"value", "stderr"}, or `None` unless each example has a number."""
    if not all(isinstance(value, (bool, int, float)) for pair in pairs for value in pair):
        return None
    differences = [float(new) - float(old) for old, new in pairs]
    count = len(differences)
    return {"value": mean(differences), "stderr": stdev(differences) / count**0.5 if count > 1 else None}


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, and print. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=expanded, help="output directory of evaluation.run")
    parser.add_argument("after", type=expanded, help="output directory of another run of it")
    args = parser.parse_args(argv)
    print(compare(args.before, args.after))


if __name__ == "__main__":
    run_cli(main)

"""Show the checkpoints in a local directory or of a Hub account as a table: what each is, and how good."""

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

from common.command_io import UserError, one_line, printable, read_json, run_cli


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Show the checkpoints in a local directory, or of a user or organisation on the Hugging Face Hub, "
        "as a table.",
        epilog="example: python -m conversion_scripts.list_checkpoints outputs",
    )
    parser.add_argument("source", help="a directory that holds checkpoints, or a name on the Hub")
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import yaml
from huggingface_hub import HfApi, ModelCard, parse_eval_result_entries
from safetensors import SafetensorError, safe_open

from common.checkpoint_io import load_config
from hub.checks import EVAL_RESULTS, weight_files
from hub.client import check_repo_id, hub_api, hub_errors, status_of
from modeling_iha import IHAConfig


HEADER = ["checkpoint", "mechanism", "P", "schedule", "parameters", "base model", "evaluation", "revision"]
UNKNOWN = "-"


def local_rows(directory: Path) -> list[list[str]]:
    """Return a row for each checkpoint of this package in `directory`, in its folders and in theirs.

    Pass over one that cannot be read, with a line on stderr.
    """
    rows = []
    for config in sorted(path for depth in ("", "*/", "*/*/") for path in directory.glob(f"{depth}config.json")):
        path = config.parent
        if not config.is_file():
            continue  # to read a pipe is to wait for ever
        try:
            if read_json(config).get("model_type") == IHAConfig.model_type:
                name = path.name if path == directory else str(path.relative_to(directory))
                rows.append(row(path, name, _parameters(path), UNKNOWN))
        except (UserError, OSError, SafetensorError) as error:
            print(f"Passed over {printable(str(path))}: {one_line(error)}", file=sys.stderr)
    return rows


def hub_rows(author: str) -> list[list[str]]:
    """Return a row for each model of this package in a Hub account, or raise `UserError`."""
    check_repo_id(author)
    with hub_errors(f"Listing the models of {author}"):
        api = hub_api()
        models = api.list_models(author=author, filter=IHAConfig.model_type, expand=["sha", "safetensors"])
        rows = [_hub_row(api, model) for model in sorted(models, key=lambda model: model.id)]
    return [row for row in rows if row is not None]


def _hub_row(api: HfApi, model) -> list[str] | None:
    """Return the row of a model, or None with a line on stderr for one that cannot be read."""
    described = ["config.json", "README.md", f"{EVAL_RESULTS}/*.yaml"]
    try:
        path = Path(api.snapshot_download(model.id, revision=model.sha, allow_patterns=described))
        return row(path, model.id, model.safetensors and model.safetensors.total, model.sha[:12])
    except Exception as error:
        # One model may be gated, or gone meanwhile; any other answer of the Hub is about all of them.
        if not isinstance(error, UserError) and status_of(error.__cause__ or error) not in (401, 403, 404):
            raise
        print(f"Passed over {model.id}: {one_line(error)}", file=sys.stderr)
        return None


def row(directory: Path, name: str, parameters: int | None, revision: str) -> list[str]:
    """Return the cells of a checkpoint whose config, card and results lie in `directory`, or raise `UserError`."""
    config = load_config(directory)
    layers = Counter(layer_type.removesuffix("_attention") for layer_type in config.layer_types)
    window = f" of {config.sliding_window}" if config.sliding_window else ""
    card = _card(directory)
    cells = [
        name,
        ", ".join(dict.fromkeys(config.attention_kinds)),
        str(config.num_pseudo_heads) if "iha" in config.attention_kinds else UNKNOWN,
        " + ".join(f"{count} {kind}{window if kind == 'sliding' else ''}" for kind, count in layers.items()),
        f"{parameters:,}" if parameters else UNKNOWN,
        str(card.data.get("base_model") or UNKNOWN) if card else UNKNOWN,
        "; ".join(_results(directory, card)) or UNKNOWN,
        revision,
    ]
    return [printable(" ".join(cell.split())) for cell in cells]


def _card(directory: Path) -> ModelCard | None:
    """Return the model card, or `None` if there is none or its metadata cannot be read."""
    if not (directory / "README.md").is_file():
        return None
    try:
        return ModelCard((directory / "README.md").read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return None


def _results(directory: Path, card: ModelCard | None) -> list[str]:
    """Return evaluations as "task metric value": the Hub's entries, then those of the card's model-index."""
    results = []
    for path in sorted(filter(Path.is_file, (directory / EVAL_RESULTS).glob("*.yaml"))):
        try:
            entries = parse_eval_result_entries(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
            continue  # somebody else's file
        results += [f"{entry.task_id} {entry.value}" for entry in entries]
    stated = card.data.get("eval_results") if card else None
    for result in stated if isinstance(stated, list) else []:
        value = f"{result.metric_value:.4g}" if isinstance(result.metric_value, float) else result.metric_value
        results.append(f"{result.dataset_name} {result.metric_type} {value}")
    return results


def _parameters(directory: Path) -> int | None:
    """Count the values in the weights that a load reads, by their headers; return `None` if a file is missing."""
    try:
        files = [directory / file for file in weight_files(directory) if file.endswith(".safetensors")]
    except UserError:
        return None
    if not all(path.is_file() for path in files):
        return None
    total = 0
    for path in files:
        with safe_open(path, "pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())
    return total


def table(rows: list[list[str]]) -> str:
    """Return the rows below `HEADER`, in columns."""
    rows = [HEADER, *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def main() -> None:
    source = parse_arguments().source
    rows = local_rows(Path(source)) if Path(source).is_dir() else hub_rows(source)
    if not rows:
        raise UserError(f"{source} holds no checkpoints of this package: expected a directory or a name on the Hub.")
    print(table(rows))


if __name__ == "__main__":
    run_cli(main)

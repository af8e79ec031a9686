"""Show the checkpoints in a local directory or of a Hub account as a table: what each is, and how good."""

import argparse
import math
import sys
from collections import Counter
from pathlib import Path

from common.command_io import (
    UserError,
    one_line,
    printable,
    read_json,
    read_text,
    read_yaml,
    refusing,
    run_cli,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: %(prog)s outputs")
    parser.add_argument("source", help="a directory that holds checkpoints, or a name on the Hub")
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from huggingface_hub import HfApi, ModelCard, parse_eval_result_entries

from common.checkpoint_io import load_config, weight_shapes
from hub.checks import EVAL_RESULTS
from hub.client import check_repo_id, hub_api, hub_errors, status_of
from kind_facts import described
from model_cards.render import MAX_CARD, parse_card
from modeling_iha import IHAConfig
from modeling_iha.configuration_interleaved import InterleavedConfig


HEADER = ["checkpoint", "mechanism", "P", "schedule", "parameters", "base model", "evaluation", "revision"]
UNKNOWN = "-"


def local_rows(directory: Path) -> list[list[str]]:
    """Return a row for each checkpoint of this package in `directory`, in its folders and in theirs.

    Pass over one that cannot be read, with a line on stderr.
    """
    rows = []
    for config in sorted(path for depth in ("", "*/", "*/*/") for path in directory.glob(f"{depth}config.json")):
        path = config.parent
        try:
            if read_json(config).get("model_type") in (IHAConfig.model_type, InterleavedConfig.model_type):
                name = path.name if path == directory else str(path.relative_to(directory))
                rows.append(row(path, name, sum(map(math.prod, weight_shapes(path).values())), UNKNOWN))
        except UserError as error:
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
    config = described(load_config(directory))
    layers = Counter(layer_type.removesuffix("_attention") for layer_type in config.layer_types)
    window = f" of {config.sliding_window}" if config.sliding_window else ""
    path = directory / "README.md"
    card = parse_card(read_text(path, MAX_CARD), path.name) if path.exists() else None
    with refusing("Its results cannot be read", AttributeError, KeyError, TypeError, ValueError):
        results = _results(directory, card)
    cells = [
        name,
        ", ".join(dict.fromkeys(config.attention_kinds)),
        str(config.num_pseudo_heads) if "iha" in config.attention_kinds else UNKNOWN,
        " + ".join(f"{count} {kind}{window if kind == 'sliding' else ''}" for kind, count in layers.items()),
        f"{parameters:,}" if parameters else UNKNOWN,
        str(card.data.get("base_model") or UNKNOWN) if card else UNKNOWN,
        "; ".join(results) or UNKNOWN,
        revision,
    ]
    return [" ".join(cell.split()) for cell in cells]


def _results(directory: Path, card: ModelCard | None) -> list[str]:
    """Return evaluations as "task metric value": the Hub's entries, then those of the card's model-index."""
    files = map(read_yaml, sorted((directory / EVAL_RESULTS).glob("*.yaml")))
    results = [f"{entry.task_id} {entry.value}" for file in files for entry in parse_eval_result_entries(file)]
    for result in (card and card.data.get("eval_results")) or []:
        value = f"{result.metric_value:.4g}" if isinstance(result.metric_value, float) else result.metric_value
        results.append(f"{result.dataset_name} {result.metric_type} {value}")
    return results


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

"""A mixture of datasets by shares of their tokens, such as ProLong's of long and short documents."""

from pathlib import Path

import numpy as np
import yaml
from datasets import interleave_datasets

from common.command_io import UserError, one_line, read_yaml
from sft.data import Rows, column


def sources(dataset_name: str) -> list[tuple[str, float]]:
    """(name of a dataset, its share of the tokens): those that a .yaml file lists as `{path: ..., share: ...}`, or
    `dataset_name` alone. Raises `UserError`; shares must add up to 1."""
    file = Path(dataset_name)
    if file.suffix not in (".yaml", ".yml"):
        return [(dataset_name, 1.0)]
    try:
        entries = read_yaml(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"dataset_name: {dataset_name} cannot be read: {one_line(error)}") from error
    expected = "expected a list of {path: NAME, share: NUMBER}"
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{dataset_name}: {expected}.")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or set(entry) != {"path", "share"} or not isinstance(entry["path"], str):
            raise UserError(f"{dataset_name}, entry {number}: {expected}, got {entry!r:.80}.")
        share = entry["share"]
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise UserError(f"{dataset_name}, entry {number}: share is {share!r:.80}: expected above 0 and at most 1.")
    total = sum(entry["share"] for entry in entries)
    if abs(total - 1) > 1e-6:
        raise UserError(f"{dataset_name}: the shares add up to {total:g}: expected 1.")
    return [(entry["path"], entry["share"]) for entry in entries]


def mix(parts: list[Rows], shares: list[float], max_length: int | None, seed: int) -> Rows:
    """Rows of all parts in a random order, until the first part is used up, each part with its share of the tokens.

    Args:
        parts: as `sft.data.tokenize` returns them; of several, only the columns of tokens are kept.
        shares: of the tokens, adding up to 1. A row is drawn with the probability share / mean length of its part.
        max_length: tokens to which a row is cut later; `None` for all.
        seed: of the order.
    """
    if len(parts) == 1:
        return parts[0]
    limit = np.inf if max_length is None else max_length
    rates = [share / np.minimum(column(part, "num_tokens"), limit).mean() for share, part in zip(shares, parts)]
    parts = [part.select_columns(["input_ids", "labels", "num_tokens", "first_label"]) for part in parts]
    return interleave_datasets(parts, [rate / sum(rates) for rate in rates], seed=seed)

"""The rows of each task, as its YAML names them under `custom_dataset`.

A function is called with the task's `metadata`: `data` (the data directory, `None` for the Hub) and what else it
takes; it returns lm-eval's {split: rows}.
"""

import re
from itertools import count

from datasets import Dataset

from evaluation import data


Splits = dict[str, Dataset]


def _splits(**rows: list[dict]) -> Splits:
    return {name: Dataset.from_list(split) for name, split in rows.items()}


def gsm8k(data_directory=None, **_) -> Splits:
    return _splits(test=data.rows("gsm8k/test.jsonl", data_directory))


def gsm8k_with_shots(data_directory=None, **_) -> Splits:
    return _splits(
        test=data.rows("gsm8k/test.jsonl", data_directory), train=data.rows("gsm8k/train.jsonl", data_directory)
    )


def math500(data_directory=None, **_) -> Splits:
    return _splits(test=data.rows("math500/test.jsonl", data_directory))


def mbpp(data_directory=None, **_) -> Splits:
    return _splits(test=data.rows("mbpp/test.jsonl", data_directory))


def mbpp_with_shots(data_directory=None, **_) -> Splits:
    return _splits(
        test=data.rows("mbpp/test.jsonl", data_directory), prompt=data.rows("mbpp/prompt.jsonl", data_directory)
    )


def humaneval(data_directory=None, **_) -> Splits:
    return _splits(test=data.rows("humaneval/HumanEval.jsonl", data_directory))


def dcformer_synthetic(data_directory=None, **_) -> Splits:
    """Each bracketed word of DCFormer's synthetic texts as a target, after the lines before it as its shots: 888 texts
    of eight lines, of which the last six have a target, give 5,328 rows {"context", "target", "shots"} (Xiao et al.,
    "Improving Transformers with Dynamically Composable Multi-Head Attention", section 4.3: between 2 and 7 shots)."""
    rows = []
    for entry in data.rows("dcformer/synthetic_dataset.jsonl", data_directory):
        before = ""
        for shots, line in enumerate(entry["texts"].strip().split("\n")):
            if found := re.search(r"\[ (.+?) \]", line):
                context = before + line[: found.start()]
                rows.append({"context": context.rstrip(), "target": f" {found.group(1)}", "shots": shots})
            before += re.sub(r"\[ (.+?) \]", r"\1", line) + "\n"
    return _splits(test=rows)


def text_windows(data_directory=None, length=4096, windows=20, tokenizer=None, **_) -> Splits:
    """Disjoint stretches of long text, about `length` tokens each: {"text"}.

    Args:
        tokenizer: the `PreTrainedTokenizerBase` that measures them.
    """
    text, rows, start = data.text("text/state_union.txt", data_directory), [], 0
    for index in count():
        # No text has more tokens than bytes; most have a quarter of that.
        piece = text[start : start + 16 * length]
        offsets = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if index == windows or len(offsets) < length:
            return _splits(test=rows or [{"text": text}])
        end = offsets[length - 1][1]
        rows.append({"text": piece[:end]})
        start += end

"""Continue prompts greedily with a model that `conversion_scripts.export` wrote.

Every export holds a copy of this file, so it imports nothing of this repository.
"""

import argparse


def parse_arguments() -> argparse.Namespace:
    example = 'example: python run_exported.py . "The capital of France is"'
    parser = argparse.ArgumentParser(description=__doc__, epilog=example)
    parser.add_argument("directory", help="the exported model")
    parser.add_argument("prompts", nargs="+", help="texts to continue, in one batch")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens to add at most (default: 64)")
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {args.max_new_tokens}: expected at least 1")
    return args


if __name__ == "__main__":
    parse_arguments()  # before the imports below, which take seconds

import logging
import sys
from pathlib import Path
from typing import Any


sys.modules["openvino_telemetry"] = None  # openvino would report its use without asking

import torch
from transformers import AutoTokenizer, DynamicCache, exporters


# PyTorch fixes what sizes of 0 and 1 imply, so a `dynamo` program refuses shorter prompts; padding makes them longer.
MIN_LENGTH = 8


def load(directory):
    """Return the `ExportedModel` in `directory`, on CPU."""
    # Loading a `dynamo` program logs a warning that PyTorch 2.13 cannot format: a page of tracebacks.
    logging.getLogger("torch._export.serde").setLevel(logging.ERROR)
    # OpenVINO computes in bfloat16 where the CPU can, whatever precision the file names.
    is_openvino = (Path(directory) / "openvino_decode.xml").exists()
    options: dict[str, Any] = {"config": {"INFERENCE_PRECISION_HINT": "f32"}} if is_openvino else {}
    exported = exporters.ExportedModel.from_pretrained(directory, device="cpu", trust_remote_code=True, **options)
    if is_openvino:
        # OpenVINO sets a signal stack for each graph, and frees it and restores the one before with the graph. Freed
        # first, the first graph would leave a stack that is unmapped: the next signal would end the process.
        exported.runners["prefill"] = exported.runners.pop("prefill")
    return exported


def token_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the position of every token, int [batch, N], from a mask [batch, N] that is 0 for padding."""
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


def next_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the position of every row's last token, int [batch, 1]."""
    return attention_mask.sum(-1, keepdim=True) - 1  # a slice of the positions has strides that were not traced


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, both int [batch, N], of prompts that are padded on the left."""
    length = max(MIN_LENGTH, *map(len, prompts))
    # The mask hides the padding, so any id serves.
    rows = [[0] * (length - len(prompt)) for prompt in prompts]
    input_ids = torch.tensor([row + prompt for row, prompt in zip(rows, prompts)])
    return input_ids, torch.tensor([row + [1] * (length - len(row)) for row in rows])


def greedy(exported, prompts: list[list[int]], max_new_tokens: int, stop: set[int]) -> tuple[torch.Tensor, ...]:
    """Continue a batch of prompts of token ids until every row has a token of `stop`.

    Return the new tokens, int [batch, new tokens], and their logits, [batch, new tokens, vocab_size].
    """
    input_ids, attention_mask = pad_left(prompts)
    position_ids = token_positions(attention_mask)
    run, cache, tokens, logits = exported.runners["prefill"], DynamicCache(), [], []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    while True:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        output = run(**inputs, past_key_values=cache)
        logits.append(output.logits[:, -1])
        input_ids = logits[-1].argmax(-1, keepdim=True)
        tokens.append(input_ids)
        done |= torch.tensor([token in stop for token in input_ids[:, 0].tolist()])
        if len(tokens) == max_new_tokens or done.all():
            return torch.cat(tokens, dim=1), torch.stack(logits, dim=1)
        run, cache = exported.runners["decode"], output.past_key_values
        attention_mask = torch.cat((attention_mask, torch.ones_like(input_ids)), dim=1)
        position_ids = next_positions(attention_mask)


def main() -> None:
    args = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.directory, trust_remote_code=True)
    prompts = tokenizer(args.prompts).input_ids
    if not all(prompts):
        sys.exit("Error: a prompt has no tokens: give a longer text.")
    exported = load(args.directory)
    stop = exported.generation_config.eos_token_id
    stop = set(stop if isinstance(stop, list) else [] if stop is None else [stop])
    tokens, _ = greedy(exported, prompts, args.max_new_tokens, stop)
    for text, prompt, row in zip(args.prompts, prompts, tokens.tolist()):
        end = next((i for i, token in enumerate(row) if token in stop), len(row))
        # Some tokenizers strip the blank before the first token that they decode.
        print(f"{text}{tokenizer.decode(prompt + row[:end])[len(tokenizer.decode(prompt)) :]}")


if __name__ == "__main__":
    main()

"""Measure the loss of plain text in bits per byte, which can be compared between tokenizers."""

import math
import re

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedTokenizerBase


class BitsPerByte:
    """Sum the losses of an evaluation over all tokens, and divide by the bytes of the tokens that were predicted.

    Trainer's loss of an evaluation is a mean over rows of the means over the tokens of their batches.

    Args:
        rows: tokenized texts, whole or packed.
        texts: the same texts.
    """

    def __init__(self, rows: Dataset, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        # The first token of each packed document, and of each piece of a long one, is not predicted.
        first = []
        for row in rows.with_format("numpy"):
            starts = np.cumsum([0, *row.get("seq_lengths", [])[:-1]])
            first += row["input_ids"][starts].tolist()
        self.tokens = sum(map(len, rows["input_ids"])) - len(first)
        self.bytes = sum(len(text.encode()) for text in texts)
        self.bytes -= sum(bytes_of_token(tokenizer, token) for token in first)
        self.sums: torch.Tensor | None = None  # over the batches of an evaluation: of losses, and of tokens

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the mean loss of a batch."""
        tokens = (labels[..., 1:] != -100).sum().to(loss.device)
        sums = torch.stack((loss.double() * tokens, tokens.double()))
        self.sums = sums if self.sums is None else self.sums + sums

    def result(self, accelerator: Accelerator) -> float:
        """Return the bits per byte of the evaluation that has ended. Every process must call this."""
        loss, tokens = accelerator.reduce(self.sums).tolist()
        self.sums = None
        return loss / tokens * self.tokens / self.bytes / math.log(2)


def bytes_of_token(tokenizer: PreTrainedTokenizerBase, token: int) -> int:
    """Return how many bytes of a text a token stands for. A special token stands for none."""
    if token in tokenizer.all_special_ids:
        return 0
    piece = tokenizer.convert_ids_to_tokens(token)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and "ByteLevel" in repr(backend.decoder):  # it may be one of a sequence
        return len(piece)  # each character stands for a byte
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return 1
    return len(piece.replace("\u2581", " ").encode())  # SentencePiece's mark of a space

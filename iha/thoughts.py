"""Tell a model's thoughts from what it says after them."""

import re
from typing import Any


# Thoughts begin with these, in the forms of DeepSeek-R1 and of OpenThoughts-114k, which the recipes of `sft` train.
THOUGHTS = ("<think>", "<|begin_of_thought|>")
ENDS = ("</think>", "<|end_of_thought|>")
MARKERS = (*THOUGHTS, *ENDS)


def opened_thought(prompt: str) -> str:
    """Return the marker with which a chat template opens a thought at the end of a prompt, or nothing."""
    return next((marker for marker in THOUGHTS if prompt.rstrip().endswith(marker)), "")


def skipped_tokens(tokenizer: Any) -> set[int]:
    """Return the special tokens that the text of a reply leaves out: all but those that begin or end thoughts."""
    added = tokenizer.added_tokens_decoder.items()
    return {token for token, text in added if text.special and str(text) not in MARKERS}


def after_thoughts(reply: str) -> str:
    """Return what a reply says after its thoughts: nothing when they do not end."""
    said = re.split("|".join(map(re.escape, ENDS)), reply)[-1]
    return "" if any(marker in said for marker in THOUGHTS) else said

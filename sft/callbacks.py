"""What a person sees of a run beside TRL's own figures: its speed, and what the model answers."""

import time

import torch
from accelerate import Accelerator
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback


SAMPLE_TOKENS = 64
IGNORED_LABEL = -100


class TrainingClock(TrainerCallback):
    """Counts the seconds that training takes, data loading included, evaluation and saving not."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def on_step_begin(self, *_, **__) -> None:
        self._since = self._since or time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    def _pause(self, *_, **__) -> None:
        self._since = None

    on_evaluate = on_save = _pause


class SampleReplies(TrainerCallback):
    """At each evaluation prints the model's greedy replies to the first prompts of the held-out rows.

    Every process generates, because a sharded model answers only when all take part; the main one prints.

    Args:
        rows: with `input_ids` and `labels`, as `sft.data.tokenize` makes them; a prompt is what comes before the first
            label. A row that is all labels has none.
        count: how many prompts.
        tokenizer: of the model.
        accelerator: the trainer's.
    """

    def __init__(
        self, rows: Dataset, count: int, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
    ) -> None:
        self.tokenizer, self.accelerator = tokenizer, accelerator
        prompts = (_prompt(row) for row in rows.select(range(min(count, len(rows)))))
        self.prompts = [prompt for prompt in prompts if prompt]

    @torch.no_grad()
    def on_evaluate(self, args, state, control, model=None, **_) -> None:
        for prompt in self.prompts:
            with self.accelerator.autocast():
                output = model.generate(
                    input_ids=torch.tensor([prompt], device=model.device),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
                    max_new_tokens=SAMPLE_TOKENS,
                    do_sample=False,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            if state.is_world_process_zero:
                asked, reply = (self.tokenizer.decode(ids) for ids in (prompt, output[0, len(prompt) :]))
                tqdm.write(f"Step {state.global_step}, sample: {asked!r} -> {reply!r}")


def _prompt(row: dict) -> list[int]:
    """The tokens of a row before its first label."""
    learned = (index for index, label in enumerate(row["labels"]) if label != IGNORED_LABEL)
    return row["input_ids"][: next(learned, 0)]

"""Give lm-eval a checkpoint as every command here loads it, and correct what would silently change figures."""

import hashlib
from datetime import datetime
from string import ascii_letters

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from iha.checkpoints import end_tokens_alone, load_model
from iha.errors import UserError
from iha.sources import Source
from iha.thoughts import skipped_tokens


# Some chat templates write the date. A fixed date keeps prompts the same when a run resumes another day.
DAY = datetime(2024, 7, 26)
# A macro that hides the function of Transformers, which calls datetime.now(). A template takes no function from its
# caller. Each part of a format, such as %d, is replaced by what it stands for on that day. The line break at the end
# belongs to the macro (`trim_blocks`): the template's first line stays the beginning of a line.
_PARTS = [f"%{flag}{letter}" for letter in ascii_letters for flag in ("", "-")]
_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace({part!r}, {DAY.strftime(part)!r})" for part in _PARTS)
    + " }}{% endmacro %}\n"
)


def device_type() -> str:
    """Return the type of the device on which this machine evaluates."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def on_one_day(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the arguments of `apply_chat_template` with which a chat template takes `DAY` for today."""
    arguments = {"date_string": DAY.strftime("%d %b %Y")}  # what Llama's template reads
    templates = tokenizer.chat_template
    has_one = not isinstance(templates, dict) or "default" in templates  # without one there is no prompt to write
    if has_one and "strftime_now" in str(templates):
        arguments["chat_template"] = _CLOCK + tokenizer.get_chat_template()
    return arguments


class Model(HFLM):
    """Run a checkpoint of any class that Transformers or this package has.

    `accelerate launch` distributes the documents over processes. The generation settings of a task replace those of
    the checkpoint, such as a repetition penalty. The checkpoint's end tokens stay.

    Args:
        seed: determines sampled replies. In every run, the same sample of the same batch draws the same random
            numbers, and another sample or batch draws others.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str = "auto",
        batch_size: int = 8,
        seed: int = 0,
    ):
        self.source = source
        self.seed = seed
        self._chats: set[str] = set()
        settings = {"dtype": dtype, "device": device_type(), "softmax_dtype": "float32"}
        settings |= {"chat_template_args": on_one_day(tokenizer), **source.arguments}
        super().__init__(source.location, tokenizer=tokenizer, batch_size=batch_size, **settings)
        self.model.generation_config = end_tokens_alone(self.model, tokenizer)
        self._before_reply = self.tok_encode("a", add_special_tokens=False)
        self._skipped = skipped_tokens(self.tokenizer)

    def _create_model(self, pretrained: str, dtype: str = "auto", **_) -> None:
        self._model = load_model(self.source, dtype).to(self.device)

    def _model_generate(self, context, max_length, stop, sample=None, **settings) -> torch.Tensor:
        """Generate for a batch of prompts, token ids [batch, length]. `sample` is the number of a sampled reply."""
        if sample is not None:
            batch = hashlib.sha256(repr((self.seed, sample, context.tolist())).encode()).digest()
            torch.manual_seed(int.from_bytes(batch[:8], "big"))
        return super()._model_generate(context, max_length, stop, **settings)

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat, which is encoded as in training: its template writes all special tokens."""
        chat = super().apply_chat_template(chat_history, add_generation_prompt)
        self._chats.add(chat)
        return chat

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return super().tok_encode(string, False if string in self._chats else add_special_tokens, **kwargs)

    def tok_batch_encode(self, strings: list[str], padding_side: str = "left", **_) -> tuple[torch.Tensor, ...]:
        """Return token ids [batch, length] and their mask. `check_prompts` has left nothing to cut."""
        rows = {"input_ids": [self.tok_encode(string) for string in strings]}
        batch = self.tokenizer.pad(rows, padding_side=padding_side, return_tensors="pt")
        return batch["input_ids"], batch["attention_mask"]

    def tok_decode(self, tokens, skip_special_tokens: bool = True) -> str:
        """Return the text of a reply with the blanks at its beginning.

        SentencePiece's decoders drop the first blank of a text, which may belong to the indent of a program. Tokens
        that begin or end thoughts stay, because without them thoughts would be taken for the answer.
        """
        tokens = [tokens] if isinstance(tokens, int) else list(tokens)
        if skip_special_tokens:
            tokens = [token for token in tokens if token not in self._skipped]
        before = self.tokenizer.decode(self._before_reply)
        whole = self.tokenizer.decode(self._before_reply + tokens)
        return whole[len(before) :]

    def check_prompts(self, task: str, requests: list[Instance]) -> None:
        """Raise `UserError` if a prompt and its reply do not fit into the context: lm-eval would cut the prompt."""
        needed = []
        limit = 0
        for request in requests:
            if request.request_type == "loglikelihood":
                tokens = sum(map(len, self._encode_pair(*request.args)))
            else:
                tokens = len(self.tok_encode(request.args[0]))
            if request.request_type == "generate_until":
                limit = request.args[1]["max_gen_toks"]
                needed.append(tokens + limit)
            else:
                needed.append(tokens - 1)  # the last token is not read
        too_long = sum(each > self.max_length for each in needed)
        if too_long:
            raise UserError(
                f"{task}: {too_long} prompts do not fit: prompt and reply need up to {max(needed)} tokens, {limit} of "
                f"them the reply's, and the context has {self.max_length}. Lower --lengths or --max-new-tokens, or "
                f"leave the task out with --tasks."
            )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[float]]:
        """Return the log-probability, in nats, of each token of a text but the first, given all tokens before it.

        lm-eval's own method returns their sum.
        """
        result = []
        for request in tqdm(requests, desc="Reading", unit="text", disable=disable_tqdm or self.rank != 0):
            ids = torch.tensor([self.tok_encode(request.args[0])], device=self.device)
            with torch.no_grad():
                logits = self.model(ids[:, :-1]).logits[0]
            parts = zip(logits.split(1024), ids[0, 1:].split(1024))  # a long text has gigabytes of logits in float32
            losses = [cross_entropy(part.float(), targets, reduction="none") for part, targets in parts]
            result.append((-torch.cat(losses)).tolist())
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result[-1])
        return result

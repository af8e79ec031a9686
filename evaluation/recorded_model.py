"""Run lm-eval's Transformers model with samples that are seeded one by one, recorded, and not cut silently."""

import hashlib
import json
from collections import Counter, defaultdict
from datetime import datetime
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from common.command_io import UserError, refusing, time_limit
from common.thoughts import THOUGHTS
from evaluation.records import Records, sample_key


# The day of every chat template that asks for today: a run that goes on tomorrow asks the same. Llama's own names it.
TODAY = datetime(2024, 7, 26)
TEMPLATE_SECONDS = 10


class SeededSampling(LogitsProcessor):
    """Sample each row of a batch from its own seed.

    One token per row is left, drawn from softmax(logits / temperature) by inverting the cumulative distribution at a
    uniform random number. Neither top-k nor top-p cuts the distribution. The random numbers of a row depend on its
    seed alone, so a sample does not depend on the batch that it is generated in.
    """

    def __init__(self, seeds: list[int], temperature: float, prompt_length: int, steps: int):
        self.uniform = torch.from_numpy(np.stack([np.random.default_rng(seed).random(steps) for seed in seeds]))
        self.temperature, self.prompt_length = temperature, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return `scores` [batch, vocabulary] with all but one token per row at minus infinity."""
        cumulative = (scores.double() / self.temperature).softmax(-1).cumsum(-1)
        uniform = self.uniform[:, input_ids.shape[1] - self.prompt_length, None].to(scores.device)
        token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        token = token.clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)


class RecordedModel(HFLM):
    """Hold an evaluated model on one device per process; `accelerate launch` shares the documents among processes.

    The generation settings of the checkpoint, such as a repetition penalty, are put aside: a task's own count.

    Args:
        records: where samples are kept; those that are there are not generated again.
        seed: of the run. A sample is seeded by (seed, task, document, prompt, settings, number of the sample), so
            neither the batch size, nor `--limit`, nor the number of samples or processes changes its random numbers.
            Logits differ in their last bits between batch sizes, which can change a token whose limit is that near.
        truncate: cut the beginning off prompts that do not fit, instead of refusing them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        records: Records,
        seed: int = 0,
        batch_size: int = 8,
        truncate: bool = False,
    ):
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.records, self.seed, self.truncate = records, seed, truncate
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = ends if isinstance(ends, list) else [ends]
        self.end_ids = sorted({*ends, self.tokenizer.eos_token_id} - {None})
        self.model.generation_config = GenerationConfig()
        # By task: truncated prompts, unfinished replies.
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self.lengths: dict[str, list[int]] = defaultdict(list)  # of prompts, in tokens
        self.commits: set[str] = set()  # that the samples were made at

    def join(self, accelerator: Accelerator) -> None:
        """Make this process one of `accelerator.num_processes` that share the documents."""
        if accelerator.num_processes > 1:
            self.accelerator = accelerator
            # lm-eval takes the rank inside the machine, which two machines would have twice.
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a chat, in which today is `TODAY`.

        Raise `UserError` for a template that fails or does not end.
        """
        with (
            refusing("The chat template cannot write this chat", Exception),
            time_limit(TEMPLATE_SECONDS),
            # Transformers' own clock cannot be passed by: of a template's arguments only plain data reach it.
            mock.patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: TODAY)),
        ):
            return super().apply_chat_template(chat_history, add_generation_prompt)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's `tensor` as if every process had the same.

        lm-eval gathers the numbers of documents here. Where they differ it repeats requests to even them out, and
        takes the replies for samples of the last document. The processes here work on their own and need no evening.
        """
        return tensor.expand(self.world_size)

    def check_prompts(self, task: str, requests: list[Instance]) -> None:
        """Add the numbers of tokens of a task's prompts to `lengths`.

        Raise `UserError` when prompts and replies do not fit into the context.
        """
        needed, limit = [], 0
        for request in requests:
            tokens = len(self.tok_encode(request.args[0]))
            self.lengths[task].append(tokens)
            if request.request_type == "generate_until":
                limit = request.args[1]["max_gen_toks"]
                needed.append(tokens + limit)
            else:  # the last token is not read
                pair = request.request_type == "loglikelihood"
                needed.append((sum(map(len, self._encode_pair(*request.args))) if pair else tokens) - 1)
        too_long = sum(each > self.max_length for each in needed)
        if too_long and not (self.truncate and limit < self.max_length):
            raise UserError(
                f"{task}: {too_long} prompts do not fit: prompt and reply need up to {max(needed)} tokens, {limit} of "
                f"them the reply's, and the context has {self.max_length}. Lower --lengths or --max-new-tokens, or "
                f"cut prompts with --truncate-prompts."
            )
        self.counts[task]["truncated_prompts"] += too_long

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return one reply per request, in order. lm-eval asks for k samples with k references to one request."""
        keys, waiting, seen = [], {}, Counter()
        for request in requests:
            prompt, settings = request.args
            index, seen[id(request)] = seen[id(request)], seen[id(request)] + 1
            document = json.dumps(request.doc, sort_keys=True, default=str)
            keys.append(sample_key(request.task_name, document, prompt, settings, index))
            if keys[-1] not in self.records:
                waiting[keys[-1]] = prompt, settings

        # Longest first: what does not fit into memory shows at once. Only equal settings share a batch.
        jobs = sorted(waiting.items(), key=lambda job: (str(job[1][1]), -len(job[1][0]), job[0]))
        with tqdm(total=len(jobs), desc="Generating", unit="sample", disable=disable_tqdm or self.rank != 0) as bar:
            while jobs:
                batch = [job for job in jobs[: self.batch_size] if job[1][1] == jobs[0][1][1]]
                for (key, _), reply in zip(batch, self._replies(batch), strict=True):
                    self.records.add(key, **reply)
                del jobs[: len(batch)]
                bar.update(len(batch))
        samples = {key: self.records[key] for key in keys}
        for (task, *_), sample in samples.items():
            self.commits.add(sample.get("commit", "unknown"))
            self.counts[task]["unfinished_replies"] += sample["unfinished"]
        return [opened_thought(request.args[0]) + samples[key]["text"] for request, key in zip(requests, keys)]

    def _replies(self, batch: list) -> list[dict]:
        """Generate a batch of equal settings: {"text", "seed", "tokens", "unfinished"} of each.

        "unfinished" means that only `max_gen_toks` stopped the reply.
        """
        settings = batch[0][1][1]
        limit, stops = settings["max_gen_toks"], [stop for stop in settings.get("until", []) if stop]
        room = self.max_length - limit
        prompts = [self.tok_encode(prompt) for _, (prompt, _) in batch]
        inputs = self.tokenizer.pad(
            {"input_ids": [prompt[-room:] for prompt in prompts]}, padding_side="left", return_tensors="pt"
        ).to(self.device)
        length = inputs["input_ids"].shape[1]
        seeds = [sample_seed(self.seed, key) for key, _ in batch]
        temperature = settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0
        with torch.no_grad():
            output = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=limit,
                do_sample=False,
                logits_processor=[SeededSampling(seeds, temperature, length, limit)] if temperature else [],
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stops, length, len(batch)) if stops else [],
                eos_token_id=self.end_ids or None,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        rows = output[:, length:].tolist()
        return [
            self._reply(prompt[-room:], row, stops, limit) | {"seed": seed}
            for prompt, row, seed in zip(prompts, rows, seeds, strict=True)
        ]

    def _reply(self, prompt: list[int], tokens: list[int], stops: list[str], limit: int) -> dict:
        end = next((i for i, token in enumerate(tokens) if token in self.end_ids), None)
        tokens = tokens[:end]
        # SentencePiece's decoders drop a blank at the beginning, which may indent the reply.
        head = prompt[-8:]
        text = self.tok_decode(head + tokens)[len(self.tok_decode(head)) :]
        stopped = min((text.find(stop) for stop in stops if stop in text), default=None)
        unfinished = end is None and stopped is None and len(tokens) >= limit
        return {"text": text[:stopped], "tokens": len(tokens), "unfinished": unfinished}

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[float]]:
        """Return the log-probability, in nats, of every token of each text but the first, given all before it.

        It takes one forward, without windows, and ends with the context. (lm-eval's own returns their sum, over
        windows.)
        """
        result = []
        for request in tqdm(requests, desc="Reading", unit="text", disable=disable_tqdm or self.rank != 0):
            ids = torch.tensor([self.tok_encode(request.args[0])[: self.max_length + 1]], device=self.device)
            with torch.no_grad():
                logits = self.model(ids[:, :-1]).logits[0]
            parts = zip(logits.split(1024), ids[0, 1:].split(1024))  # a long text has gigabytes of logits in float32
            losses = [cross_entropy(part.float(), targets, reduction="none") for part, targets in parts]
            result.append((-torch.cat(losses)).tolist())
        return result


def opened_thought(prompt: str) -> str:
    """Return the marker with which a chat template ends `prompt` so that the reply begins inside a thought, or ""."""
    return next((marker for marker in THOUGHTS if prompt.rstrip().endswith(marker)), "")


def sample_seed(seed: int, key: tuple[str, str, int]) -> int:
    """Return the seed of one sample of a run."""
    # Python's own hash differs between processes.
    return int.from_bytes(hashlib.sha256(json.dumps([seed, *key]).encode()).digest()[:8], "big")

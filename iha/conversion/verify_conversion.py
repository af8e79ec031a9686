"""Check on real text that a converted checkpoint computes what its source does (`iha.api.verify`).

The source is first compared with itself, with and without a cache, because no conversion can agree with a source that
disagrees with itself.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from iha.checkpoints import load_config, load_model, load_tokenizer, vocabulary_of
from iha.errors import UserError
from iha.files import expanded, read_text, write_json
from iha.foreign_code import note_foreign_code
from iha.kinds import companion_of, interleaved_kind, is_interleaved
from iha.sources import Source
from modeling_iha.modeling_interleaved import backbone_of

from .architectures import exact_length
from .shared import check_iha


DEFAULT_TEXT = Path(__file__).with_name("verify_text.txt")
# Rounding changes logits up to 100 by less than the first number, and larger ones by less than the second number times
# the largest logit.
MAX_LOGIT_DIFFERENCE = 1e-3
MAX_RELATIVE_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Run:
    """Hold what a model computed from the text."""

    logits: torch.Tensor  # [tokens, vocab_size], float32
    continuation: torch.Tensor  # [new tokens]


@dataclass(frozen=True)
class Comparison:
    """Hold how far a run is from the reference, in sequences of at most `exact_length` tokens."""

    max_logit_difference: float
    allowed_difference: float
    mean_kl: float  # of KL(reference || model), over the tokens, in nats
    greedy_agreement: int  # greedily decoded tokens before the first that differs
    greedy_tokens: int
    exact_length: int | None = None  # by the windows of both models; None for any length

    @property
    def passed(self) -> bool:
        """Return whether the run agrees with the reference. In sequences longer than `exact_length` it does not."""
        # Written so that a NaN fails.
        return self.max_logit_difference < self.allowed_difference and self.greedy_agreement == self.greedy_tokens


@torch.no_grad()
def decode(model: PreTrainedModel, prompt: torch.Tensor, max_new_tokens: int) -> Run:
    """Continue `prompt` [N] greedily with a cache, and return the new tokens and the logits of each."""
    # A checkpoint's own settings may stop early, penalise tokens or search by beams.
    model.generation_config = GenerationConfig(pad_token_id=0)
    generated = model.generate(  # its mixin is not in the class's type
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Run(torch.cat(generated.logits).float(), generated.sequences[0, len(prompt) :])


@torch.no_grad()
def forward(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [N, vocab_size], float32, of `tokens` [N], computed without a cache."""
    return model(tokens[None], use_cache=False).logits[0].float()


def compare_logits(reference: torch.Tensor, logits: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of logits [tokens, vocab_size], and the mean of KL(reference || logits)."""
    divergence = 0.0
    largest = []
    # In float64 the logits of all tokens would take too much memory.
    for expected, actual in zip(reference.split(64), logits.split(64)):
        largest.append((expected - actual).abs().max())
        expected = expected.double().log_softmax(-1)
        actual = actual.double().log_softmax(-1)
        divergence += torch.nn.functional.kl_div(actual, expected, log_target=True, reduction="sum").item()
    return torch.stack(largest).max().item(), divergence / len(reference)


def compare(reference: Run, run: Run, exact_length: int | None = None) -> Comparison:
    """Return how far `run` is from `reference`, both over at most `exact_length` tokens."""
    largest, divergence = compare_logits(reference.logits, run.logits)
    agrees = (reference.continuation == run.continuation).long()
    return Comparison(
        max_logit_difference=largest,
        allowed_difference=max(MAX_LOGIT_DIFFERENCE, MAX_RELATIVE_DIFFERENCE * reference.logits.abs().max().item()),
        mean_kl=divergence,
        greedy_agreement=int(agrees.cumprod(0).sum()),
        greedy_tokens=len(agrees),
        exact_length=exact_length,
    )


def run_source(name: str, source: PreTrainedModel, tokens: torch.Tensor, prompt: torch.Tensor, new_tokens: int) -> Run:
    """Return the logits of `tokens` [N], and the continuation of `prompt`, that the model `name` computes.

    Raise `UserError` if they are not finite, or if it computes something else with a cache than without.
    """
    logits = forward(source, tokens)
    decoded = decode(source, prompt, new_tokens)
    if not all(computed.isfinite().all() for computed in (logits, decoded.logits)):
        raise UserError(f"{name} itself gives NaN or infinity for this text: no conversion can be compared with it.")
    uncached = forward(source, torch.cat((prompt, decoded.continuation[:-1])))[-new_tokens:]
    itself = compare(Run(uncached, uncached.argmax(-1)), decoded)
    if not itself.passed:
        raise UserError(
            f"{name} disagrees with itself: from its cache it decodes logits that differ by up to "
            f"{itself.max_logit_difference:.2g}. The fault is the source's or Transformers', not the conversion's."
        )
    return Run(logits, decoded.continuation)


@torch.no_grad()
def break_one_parameter(model: PreTrainedModel) -> None:
    """Reverse the sign of a parameter of attention, in place, in the first layer that has one.

    It is the `control` of the layer's kind, or else the projection of the values.
    """
    if is_interleaved(model.config):
        layers = model.config.get_text_config(decoder=True).interleaved_layers
        kinds = dict.fromkeys(layers, interleaved_kind(model.config))
    else:
        kinds = {f"layers.{i}.self_attn": kind for i, kind in enumerate(model.config.attention_kinds)}
    state = backbone_of(model).state_dict()
    for name, kind in kinds.items():
        control = companion_of(kind).control
        # A mixing weight is a start and a change.
        parts = [] if control is None else [f"{name}.{control}", f"{name}.{control}_start"]
        parts = [part for part in parts if part in state] or [f"{name}.v_proj.weight"]
        found = [state[part] for part in parts if part in state]
        if found:
            for weight in found:
                weight.neg_()
            return
    raise UserError(f"No layer of kind {', '.join(set(kinds.values()))} has a parameter to break as a control.")


def read_tokens(tokenizer, path: Path, count: int) -> torch.Tensor:
    """Return the first `count` tokens of the text in `path`, [count], or raise `UserError` if there are fewer."""
    tokens = tokenizer(read_text(path), return_tensors="pt").input_ids[0]
    if len(tokens) < count:
        raise UserError(f"{path} has {len(tokens)} tokens, and tokens={count} asks for more: give a longer text.")
    return tokens[:count]


def read_both(
    source: Source, converted: Source, text: Path, count: int
) -> tuple[PreTrainedConfig, PreTrainedConfig, torch.Tensor]:
    """Return the configs of both checkpoints, and the tokens [count] of the text, which both tokenizers make of it.

    Raise `UserError` if one is no conversion of the other.
    """
    config = load_config(source)
    tokens = read_tokens(load_tokenizer(source, vocabulary_of(config)), text, count)
    note_foreign_code(converted)
    converted_config = load_config(converted)
    if not is_interleaved(converted_config):
        check_iha(converted, converted_config)
    if vocabulary_of(converted_config) != vocabulary_of(config):
        sizes = f"{vocabulary_of(converted_config)} and {vocabulary_of(config)}"
        raise UserError(f"{converted} is not a conversion of {source}: their vocabulary sizes are {sizes}.")
    if not torch.equal(tokens, read_tokens(load_tokenizer(converted, vocabulary_of(config)), text, count)):
        raise UserError(f"The tokenizer in {converted} cuts the text into other tokens than the one in {source}.")
    return config, converted_config, tokens


def _print_table(results: dict[str, Comparison]) -> None:
    """Print how far each model is from the source."""
    print(f"\n{'':12}{'max |dlogit|':>14}{'KL per token':>14}{'greedy':>10}")
    for name, result in results.items():
        greedy = f"{result.greedy_agreement}/{result.greedy_tokens}"
        verdict = "agrees" if result.passed else "differs"
        print(f"{name:12}{result.max_logit_difference:14.2e}{result.mean_kl:14.2e}{greedy:>10}  {verdict}")


def compare_checkpoints(
    source: Source, converted: Source, text: str | None, tokens: int, max_new_tokens: int, json: str | None
) -> dict[str, Comparison]:
    """Check that the checkpoint `converted` computes what its `source` does, and that the check can fail.

    Both are compared in float32 on `tokens` tokens of the file `text`, by default a speech, of which the last
    `max_new_tokens` are decoded greedily. The figures are printed and, if a file `json` is named, written to it.
    Return how far the conversion and the control with a broken parameter are from the source. If their windows differ,
    only the first tokens are compared, and `exact_length` says how many tokens a sequence may have. Raise `UserError`
    if the conversion differs or the control does not.
    """
    config, converted_config, ids = read_both(source, converted, expanded(text or DEFAULT_TEXT), tokens)
    saved_dtype = converted_config.dtype  # the load in float32 changes it
    is_rounded = saved_dtype in (torch.bfloat16, torch.float16) and saved_dtype != config.dtype
    longest = exact_length(config, converted_config)
    length = min(tokens, longest or tokens)
    new_tokens = max_new_tokens
    if length < tokens:
        new_tokens = min(new_tokens, length // 2)
        how = f"The check uses {length} tokens and decodes the last {new_tokens}. Longer inputs are only compared."
        print(f"Because of its windows, {converted} is exact only for up to {length} tokens. {how}")
    prompt = ids[: length - new_tokens]

    print(f"1 of 4: reading {source}", flush=True)
    model = load_model(source, torch.float32, config)
    print(f"2 of 4: running it on {tokens} tokens, and decoding {new_tokens}", flush=True)
    reference = run_source(str(source), model, ids, prompt, new_tokens)
    del model  # before the weights of the conversion are read
    print(f"3 of 4: reading {converted}", flush=True)
    model = load_model(converted, torch.float32, converted_config)
    print("4 of 4: running it, and a control with a broken parameter", flush=True)
    within = Run(reference.logits[:length], reference.continuation)
    logits = forward(model, ids)
    decoded = decode(model, prompt, new_tokens).continuation
    results = {"converted": compare(within, Run(logits[:length], decoded), longest)}
    break_one_parameter(model)
    broken = Run(forward(model, ids[:length]), decode(model, prompt, new_tokens).continuation)
    results["control"] = compare(within, broken, longest)

    _print_table(results)
    if length < tokens:
        largest, divergence = compare_logits(reference.logits[length:], logits[length:])
        print(f"{f'after {length}':12}{largest:14.2e}{divergence:14.2e}{'':10}  differs, as expected from its windows")
    if json is not None:
        figures = {name: asdict(result) | {"passed": result.passed} for name, result in results.items()}
        write_json(json, {"tokens": length, **figures})

    if results["control"].passed:
        raise UserError("The control with a broken parameter passed as well: this text cannot tell the models apart.")
    if not results["converted"].passed:
        expected = f"max |dlogit| < {results['converted'].allowed_difference:g} and the same greedy continuation"
        rounded = f" Its weights were rounded to {saved_dtype}: verify a conversion without --dtype." * is_rounded
        raise UserError(f"{converted} does not compute what {source} does: expected {expected}.{rounded}")
    limit = "" if longest is None else f", for sequences of at most {longest} tokens; longer ones differ"
    print(f"The conversion is exact up to rounding{limit}.")
    return results

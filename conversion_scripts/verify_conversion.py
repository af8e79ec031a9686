"""Check on real text that a converted checkpoint computes what its source does, and that the check can fail.

Both models run in float32 on the same tokens. As a control, the command breaks one parameter of the converted model in
memory; the same thresholds must reject that model.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from common.command_io import UserError, check_output_file, refusing, run_cli, write_json


DEFAULT_TEXT = Path(__file__).with_name("verify_text.txt")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare a converted IHA checkpoint with its source on real text. The exit code is 1 if they "
        "differ, or if a deliberately broken control does not.",
        epilog="example: python -m conversion_scripts.verify_conversion HuggingFaceTB/SmolLM2-135M-Instruct "
        "smollm2-iha",
    )
    parser.add_argument("src", help="source checkpoint: a directory, a Hub id or a GGUF file")
    parser.add_argument("dst", help="converted checkpoint: a directory or a Hub id")
    parser.add_argument(
        "--text", type=Path, default=DEFAULT_TEXT, help="text file (default: a speech that ships with the command)"
    )
    parser.add_argument(
        "--tokens", type=int, default=500, help="number of tokens of the text to compare (default: 500)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, help="number of tokens to decode greedily (default: 64)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if not 0 < args.max_new_tokens < args.tokens:
        parser.error(f"--max-new-tokens {args.max_new_tokens} must be at least 1 and less than --tokens {args.tokens}")
    return args


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from transformers import GenerationConfig, PreTrainedModel

from common.checkpoint_io import load_config, load_model, load_tokenizer
from common.foreign_code import note_foreign_code
from conversion_scripts.conversion import check_iha
from kinds import all_companions
from modeling_iha import IHAForCausalLM


MAX_LOGIT_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Run:
    """Hold what a model computed from the text."""

    logits: torch.Tensor  # [tokens, vocab_size], float32
    continuation: torch.Tensor  # [new tokens]


@dataclass(frozen=True)
class Comparison:
    """Say how far a run is from the reference."""

    max_logit_difference: float
    mean_kl: float  # of KL(reference || model), over the tokens, in nats
    greedy_agreement: int  # greedily decoded tokens before the first that differs
    greedy_tokens: int

    @property
    def passed(self) -> bool:
        # Written so that a NaN fails.
        return self.max_logit_difference < MAX_LOGIT_DIFFERENCE and self.greedy_agreement == self.greedy_tokens


@torch.no_grad()
def run_model(model: PreTrainedModel, tokens: torch.Tensor, max_new_tokens: int) -> Run:
    """Compute the logits of `tokens` [N], and continue all but the last `max_new_tokens` of them with a cache.

    Neither is longer than N tokens, so N is the length up to which a conversion was checked.
    """
    prompt = tokens[None, :-max_new_tokens]
    # A checkpoint's own settings may stop early, penalise tokens or search by beams.
    model.generation_config = GenerationConfig(pad_token_id=0)
    generated = model.generate(  # type: ignore[operator]  # its mixin is not in the class's type
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
    )
    return Run(model(tokens[None], use_cache=False).logits[0].float(), generated[0, prompt.shape[1] :])


def compare(reference: Run, run: Run) -> Comparison:
    """Return how far `run` is from `reference`."""
    divergence, largest = 0.0, []
    # In float64 the logits of all tokens would take too much memory.
    for expected, actual in zip(reference.logits.split(64), run.logits.split(64)):
        largest.append((expected - actual).abs().max())
        expected, actual = expected.double().log_softmax(-1), actual.double().log_softmax(-1)
        divergence += torch.nn.functional.kl_div(actual, expected, log_target=True, reduction="sum").item()
    agrees = (reference.continuation == run.continuation).long()
    return Comparison(
        max_logit_difference=torch.stack(largest).max().item(),
        mean_kl=divergence / len(reference.logits),
        greedy_agreement=int(agrees.cumprod(0).sum()),
        greedy_tokens=len(agrees),
    )


@torch.no_grad()
def break_one_parameter(model: IHAForCausalLM) -> None:
    """Reverse the sign of a parameter, in place, in the first layer whose mechanism has a `control`."""
    controls = {kind: mechanism.control for kind, mechanism in all_companions().items() if mechanism.control}
    for i, kind in enumerate(model.config.attention_kinds):
        if kind in controls:
            model.get_parameter(f"model.layers.{i}.self_attn.{controls[kind]}").neg_()
            return
    raise UserError(
        f"The converted model has no layer of kind {', '.join(map(repr, controls))}, so there is nothing to break as "
        "a control."
    )


def verify(
    reference: Run, converted: IHAForCausalLM, tokens: torch.Tensor, max_new_tokens: int = 64
) -> dict[str, Comparison]:
    """Compare a float32 model with what its source computed of `tokens` [N], as "converted", and once as "control".

    Afterwards a parameter of `converted` is broken, and it has lost its generation settings.
    """
    result = compare(reference, run_model(converted, tokens, max_new_tokens))
    break_one_parameter(converted)
    return {"converted": result, "control": compare(reference, run_model(converted, tokens, max_new_tokens))}


def read_tokens(tokenizer, path: Path, count: int) -> torch.Tensor:
    """Return the first `count` tokens of the text in `path`, [count], or raise `UserError` if there are fewer."""
    with refusing(f"{path} cannot be read as UTF-8 text", OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    if len(tokens) < count:
        raise UserError(
            f"{path} has {len(tokens)} tokens; {count} are asked for. Give a longer --text or fewer --tokens."
        )
    return tokens[:count]


def main() -> None:
    args = parse_arguments()
    if args.json is not None:
        check_output_file(args.json, replace=True)
    config = load_config(args.src)
    tokenizer = load_tokenizer(args.src, config.vocab_size)
    tokens = read_tokens(tokenizer, args.text, args.tokens)

    note_foreign_code(args.dst)
    converted_config = load_config(args.dst)
    check_iha(args.dst, converted_config)
    if converted_config.vocab_size != config.vocab_size:
        raise UserError(
            f"{args.dst} has a vocabulary of {converted_config.vocab_size} and {args.src} one of {config.vocab_size}: "
            "it is not a conversion of it."
        )
    converted_tokens = read_tokens(load_tokenizer(args.dst, config.vocab_size), args.text, args.tokens)
    if not torch.equal(tokens, converted_tokens):
        raise UserError(f"The tokenizer in {args.dst} cuts the text into other tokens than the one in {args.src}.")

    print(f"Reading {args.src} and running it on {args.tokens} tokens", flush=True)
    # No name holds the source, so that its weights are freed before those of the conversion are read.
    reference = run_model(load_model(args.src, torch.float32), tokens, args.max_new_tokens)
    print(f"Reading {args.dst} and running it and the control", flush=True)
    results = verify(reference, load_model(args.dst, torch.float32), tokens, args.max_new_tokens)

    print(f"\n{'':12}{'max |dlogit|':>14}{'KL per token':>14}{'greedy':>10}")
    for name, result in results.items():
        greedy = f"{result.greedy_agreement}/{result.greedy_tokens}"
        verdict = "agrees" if result.passed else "differs"
        print(f"{name:12}{result.max_logit_difference:14.2e}{result.mean_kl:14.2e}{greedy:>10}  {verdict}")
    if args.json is not None:
        figures = {name: asdict(result) | {"passed": result.passed} for name, result in results.items()}
        write_json(args.json, {"tokens": args.tokens, **figures})

    if results["control"].passed:
        raise UserError("The control with a broken parameter passed as well: this text cannot tell the models apart.")
    if not results["converted"].passed:
        hint = (
            " It has sliding layers: see its README.md for the lengths it is exact for, and set --tokens and "
            "--max-new-tokens." * (converted_config.sliding_window is not None)
        )
        raise UserError(
            f"{args.dst} does not compute what {args.src} does: expected max |dlogit| < {MAX_LOGIT_DIFFERENCE:g} and "
            f"the same greedy continuation.{hint}"
        )
    print("The conversion is exact up to rounding.")


if __name__ == "__main__":
    run_cli(main)

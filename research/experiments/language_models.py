"""Train language models with every attention kind and schedule from scratch, and compare their losses on real text.

"Interleaved Head Attention" compares global attention, global and local attention, talking heads, Diff Transformer and
its own schedule, four layers with a window of N / (2 P^2) to one global layer, at equal FLOPs (Section 5, Appendix C).
DCMHA claims a lower loss than Llama's attention (its Figure 4 and Table 4). Here these and the other kinds learn the
bytes of a text in rows of N under the protocol of protocol.py. All have the same number of parameters: a variant with
more of them has a narrower FFN. The tables of other lengths than 256 have the length in their name.

- `mha_stretched` is "mha" with positions times 4, which "iha" with P = 4 has for its virtual tokens: the control for
  positions that are wider apart.
- "hyper" and "simplicial" attend to pairs of tokens. They are left out: at N = 256 they cost 256 times "mha".

The text is the source of Python's standard library, in the order of its modules. Its last tenth is held out. A run
of 400 steps takes one core 47 seconds ("mha") to two minutes ("iha_4"). The committed table has one variant more,
"multi_token" (multi-token attention), whose code is in the git history. Its twelve variants and six seeds took more
than three hours, with the tuning of the rates.

example: python -m research.experiments.language_models --tokens 512 --kinds mha iha_2
"""

import hashlib
import sysconfig
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from iha import plots
from iha.errors import UserError, run_cli
from iha.model_cost import model as cost_of
from modeling_iha import IHAConfig, IHAForCausalLM
from research.experiments.options import protocol_parser
from research.experiments.protocol import BUDGETS, COUNTS, Rates, budgets, compare_tuned, end, fit, new_model
from research.experiments.study import begin, correct_by_holm, interval, points, write


# Variant -> its fields besides those of the size. Four layers in five have a window, the length divided by `windows`.
# `control` is another variant that it is compared with, besides the first.
SCHEDULE = {"attention_kinds": "iha", "control": "global_local"}
VARIANTS: dict[str, dict] = {
    "mha": {},
    "mha_stretched": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 0.25}},
    "global_local": {"windows": 16},
    "global_local_32": {"windows": 32, "control": "iha_4"},
    "iha_2": {**SCHEDULE, "num_pseudo_heads": 2, "windows": 8},
    "iha_4": {**SCHEDULE, "num_pseudo_heads": 4, "windows": 32},
    **{kind: {"attention_kinds": kind} for kind in ("talking_heads", "diff", "diff_v2", "knocking_heads")},
    "gated": {"output_gate": "elementwise"},
}


def sized(width: int, ffn: int, layers: int, heads: int, **training: int) -> dict:
    """Return the fields of a config, and what is trained at this size."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {"fields": dict(zip(names, (width, ffn, layers, heads))), **training}


SMALL = sized(width=64, ffn=176, layers=5, heads=4, tokens_per_step=2048, steps=400)
EVALUATIONS = 10
HELD_OUT_ROWS = 64


def read_text() -> torch.Tensor:
    """Return the bytes of the modules of Python's standard library, as uint8."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray().join(module.read_bytes() for module in modules), dtype=torch.uint8)


def text_sha256(text: torch.Tensor) -> str:
    """Return the SHA-256 of a text's bytes, in hexadecimal: runs on another text are not reused."""
    return hashlib.sha256(text.numpy().tobytes()).hexdigest()


def build(size: dict, **fields) -> IHAConfig:
    """Return the config of a variant at a size; with `windows` in `fields` four layers in five have one.

    The layers with a window are of the kind that `attention_kinds` names, the others of kind "mha".
    """
    fields = {"attention_kinds": "mha", **size["fields"], **fields}
    for name in ("control", "value_residual"):  # these are no fields of a config
        fields.pop(name, None)
    heads = fields["num_attention_heads"]
    special = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    every = {"num_key_value_heads": heads, "num_pseudo_heads": heads, "max_position_embeddings": size["tokens"]}
    if windows := fields.pop("windows", None):
        fields["sliding_window"] = size["tokens"] // windows
        fields["attention_kinds"] = [fields["attention_kinds"]] * 4 + ["mha"]
        fields["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"]
    return IHAConfig(**{**special, **every, **fields})


def config_of(size: dict, **fields) -> IHAConfig:
    """Return the config of a variant at a size, whose FFN is as wide as the parameters of "mha" allow."""
    more = cost_of(build(size, **fields), 1).parameters - cost_of(build(size), 1).parameters
    per_channel = 3 * size["fields"]["hidden_size"] * size["fields"]["num_hidden_layers"]
    width = size["fields"]["intermediate_size"] - round(more / per_channel)
    return build(size, **{**fields, "intermediate_size": width})


def rows_of(text: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return rows of `tokens` and the one after them, int64 [rows, tokens + 1]."""
    return text[starts[:, None] + torch.arange(tokens + 1)].long()


def losses_of(model: IHAForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Return the losses in nats per byte, [rows, tokens]. On a GPU the model computes in bfloat16 autocast."""
    with torch.autocast("cuda", torch.bfloat16, enabled=rows.is_cuda):
        logits = model(rows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.transpose(1, 2).float(), rows[:, 1:], reduction="none")


def train(
    name: str, model: IHAForCausalLM, seed: int, size: dict, text: torch.Tensor, rate: float, mixing: float
) -> dict:
    """Train a model on the rows of a seed, with a rate and a multiple of it for the mixing.

    Return the seconds, and a curve of the step and the held-out loss.
    """
    held_out = len(text) // 10
    generator = torch.Generator().manual_seed(seed)
    tokens = size["tokens"]
    steps = size["steps"]
    # In float32 the places in a long text would be rounded.
    held_out_rows = size.get("held_out_rows", HELD_OUT_ROWS)
    starts = torch.linspace(len(text) - held_out, len(text) - tokens - 1, held_out_rows, dtype=torch.float64).long()
    validation = rows_of(text, starts, tokens)

    def loss() -> torch.Tensor:
        chosen = torch.randint(len(text) - held_out - tokens, (size["batch"],), generator=generator)
        return losses_of(model, rows_of(text, chosen, tokens)).mean()

    def evaluate(averaged: torch.nn.Module, step: int) -> list[float]:
        mean = torch.cat([losses_of(averaged, rows) for rows in validation.chunk(4)]).mean(dim=0).mean().item()
        print(f"{name}, seed {seed}: step {step} of {steps}, held-out loss {mean:.4f}", flush=True)
        return [mean]

    curve, seconds = fit(model, loss, evaluate, steps, rate, mixing, EVALUATIONS)
    return {"curve": curve, "seconds": seconds}


def one_run(size: dict, variants: dict, text: torch.Tensor, name: str, seed: int, rate: float, mixing: float) -> dict:
    """Train a new model of one of the variants, `name`, as `train` does."""
    model = new_model(config_of(size, **variants[name]), build(size), seed)
    return train(name, model, seed, size, text, rate, mixing)


def others_of(base: str, control: str | None) -> dict[str, str | None]:
    """Return what a variant is compared with, by the keys of a row: the first variant, its own control, and "mha"."""
    others = {"minus_base": base, "minus_control": control}
    return others if base == "mha" else {**others, "minus_mha": "mha"}


def summary(
    name: str, size: dict, variants: dict[str, dict], rates: dict[str, Rates], runs: dict[str, list[dict]]
) -> dict:
    """Return a row of the table, with the differences from the first variant, the variant's own control and "mha"."""
    config = config_of(size, **variants[name])
    seconds = [run["seconds"] for run in runs[name]]
    row = {
        "tokens": size["tokens"],
        "variant": name,
        "parameters": cost_of(config, 1).parameters,
        "intermediate_size": config.intermediate_size,
        **rates[name]._asdict(),
        "loss": interval([end(run) for run in runs[name]]),
        "seconds": interval(seconds) if all(seconds) else {"values": seconds},
        "control": variants[name].get("control"),
    }
    for key, other in others_of(next(iter(runs)), row["control"]).items():
        if other in runs and other != name:
            configs = [config_of(size, **variants[each]) for each in (name, other)]
            costs = [[cost_of(config, size["tokens"], form).training for config in configs] for form in COUNTS]
            row[key] = budgets(runs, name, other, (ours / theirs for ours, theirs in costs))
    return row


def summaries(size: dict, variants: dict[str, dict], rates: dict[str, Rates], runs: dict[str, list]) -> list[dict]:
    """Return the rows of the table, with p-values."""
    rows = [summary(name, size, variants, rates, runs) for name in runs]
    compared = [row[key] for row in rows for key in ("minus_base", "minus_control", "minus_mha") if key in row]
    correct_by_holm([each["difference"] for budgets_of in compared for each in budgets_of.values()])
    return rows


def comparisons(rows: list[dict]) -> dict[str, dict]:
    """Return the comparisons of a table's rows, by the names of the two variants."""
    return {
        f"{row['variant']} - {other}": row[key]
        for row in rows
        for key, other in others_of(rows[0]["variant"], row["control"]).items()
        if key in row
    }


def by_budget(compared: dict[str, dict]) -> dict[str, list[plots.Point | None]]:
    """Return the differences of losses of `comparisons` by each budget, for `plots.dots`."""
    return {
        f"equal {budget}{' within the windows' * (budget == COUNTS['sdpa'])}": points(
            [each.get(budget, {}).get("difference") for each in compared.values()]
        )
        for budget in BUDGETS
    }


def plot(table: dict) -> Figure:
    """Plot the differences of losses by budget."""
    rows = {row["variant"]: row for row in table["rows"]}

    def apart(difference: dict) -> str:
        return f"{abs(difference['mean']):.2f} {'ahead' if difference['mean'] < 0 else 'behind'}"

    messages = [
        f"P = 4 is {apart(rows['iha_4'][key]['steps']['difference'])} of {other} at equal steps, and "
        f"{apart(rows['iha_4'][key][COUNTS['paper']]['difference'])} at equal FLOPs as the paper counts"
        for key, other in (("minus_base", table["rows"][0]["variant"]), ("minus_control", "global_local"))
        if key in rows.get("iha_4", {})
    ]
    compared = comparisons(table["rows"])
    message = f"Rows of {table['tokens']} bytes. {'. '.join(messages) or 'Losses by budget'}"
    figure, (axes,) = plots.panels(message, height=1 + 0.38 * len(compared))
    plots.dots(axes, list(compared), by_budget(compared), (-0.6, 0.65), mark=0)
    axes.set(xlabel="difference of losses, nats per byte, 95% interval (below 0 the first is better)")
    return figure


def size_of(size: dict, tokens: int) -> dict:
    """Return a size with the length of its rows, and as many of them as a step's tokens allow. Raise `UserError`."""
    if not 32 <= tokens <= size["tokens_per_step"]:
        raise UserError(f"--tokens {tokens}: expected at least 32, at most {size['tokens_per_step']}.")
    return {**size, "tokens": tokens, "batch": size["tokens_per_step"] // tokens}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    parser = protocol_parser(__doc__, "language_models", 0.02, VARIANTS)
    parser.add_argument("--tokens", type=int, default=256, help="length of rows (256)")
    args = parser.parse_args(argv)
    if args.tokens != 256:
        args.study += f"_{args.tokens}"
    begin(args)
    compare(args, size_of(SMALL, args.tokens), VARIANTS)


def compare(args: Namespace, size: dict, variants: dict[str, dict]) -> None:
    """Train and compare `args.kinds` among the variants, and write the table. Raise `UserError`."""
    text = read_text()
    # All that a run depends on besides its variant, its rates and its seed.
    setting = {**size, "text_sha256": text_sha256(text)}
    run = partial(one_run, size, variants, text)
    rates, runs = compare_tuned(args, setting, run, lambda name: config_of(size, **variants[name]))
    curves = {name: [run["curve"] for run in of_variant] for name, of_variant in runs.items()}
    write(args, plot, **setting, rows=summaries(size, variants, rates, runs), runs=curves)


if __name__ == "__main__":
    run_cli(main)

"""Find which part of DCMHA's dynamic composition of heads lowers the loss of a language model.

"Improving Transformers with Dynamically Composable Multi-Head Attention", Section 4.6 and Table 9. Each component is
added by itself to Transformer++ (405M parameters, the Pile). The paper finds that all of them lower the perplexity,
dynamic composition more than a static one, projections more than gates, weights of the queries or of the keys alone
nearly as much as both, composing after the softmax far more than before it, and a rank of 2 the most.

Here the components are added to "mha" in models of two layers, which learn the text of language_models.py under the
protocol of protocol.py. As in the paper the FFN keeps its width, so a configuration has more parameters
than "mha", at this size up to 22%, where the paper's R = 2 takes 2.6%. "wider" is the control: "mha" whose FFN makes
it as large as "dcmha". Left out are what the paper's DCFormer++ has besides, local windows in every other layer and
QK-norm. The models trained here also answer the question of head_diversity.py (Figure 5).

example: python -m research.experiments.dcmha_ablation --kinds mha pre post
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial

from common.command_io import run_cli
from research.experiments.options import protocol_parser


# Configuration -> perplexity in Table 9, options of kind "dcmha".
CONFIGURATIONS = {
    "mha": (11.68, None),
    "wider": (None, None),
    "static": (11.17, {"rank": 0, "gate": False, "base_map": True}),
    "projection": (10.95, {"gate": False}),
    "gate": (11.31, {"rank": 0}),
    "all": (10.79, {"base_map": True}),
    "dcmha": (10.83, {}),
    "query": (10.89, {"sides": "query"}),
    "key": (10.91, {"sides": "key"}),
    "pre": (11.54, {"stages": "pre"}),
    "post": (11.05, {"stages": "post"}),
    "rank_1": (10.87, {"rank": 1}),
    "rank_4": (10.89, {"rank": 4}),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return protocol_parser(__doc__, "dcmha_ablation", 0.02, CONFIGURATIONS).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure

from common import plots
from kinds.model_cost import model as cost_of
from modeling_iha import IHAConfig
from research.experiments.head_diversity import CIRCUITS, curves_of
from research.experiments.language_models import as_large_as, build, read_text, setting_of, sized, train
from research.experiments.protocol import Rates, by_seed, compare_tuned, end, new_model
from research.experiments.study import begin, correct_by_holm, differences, interval, points, write


SMALL = sized(width=64, ffn=192, layers=2, heads=4, tokens=64, batch=8, steps=600)
FULL = sized(width=512, ffn=1536, layers=6, heads=8, tokens=256, batch=64, steps=10000)
# What the paper concludes, that the first has a lower perplexity than the second, and the control.
CLAIMS = [("projection", "gate"), ("post", "pre")]
CLAIMS += [("dcmha", other) for other in ("static", "query", "key", "rank_1", "rank_4", "wider")]


def config_of(name: str, size: dict) -> IHAConfig:
    """Return the config of a configuration's model."""
    if name == "wider":
        return as_large_as(config_of("dcmha", size), size)
    options = CONFIGURATIONS[name][1]
    own = {} if options is None else {"attention_kinds": "dcmha", "attention_options": {"dcmha": options}}
    return build(size, **own)


def one_run(size: dict, text: torch.Tensor, device: str, name: str, seed: int, rate: float, mixing: float) -> dict:
    """Return the run of `language_models.train`, and the mean of what the trained heads' components capture."""
    model = new_model(config_of(name, size), config_of("mha", size), seed).to(device)
    run = train(name, model, seed, size, text, rate, mixing)
    return {**run, **{circuit: curve.mean().item() for circuit, curve in curves_of(model.cpu(), name).items()}}


def difference(lower: str, higher: str, runs: dict[str, list[dict]]) -> dict:
    """Return how much lower the loss of one configuration is than that of another on the same seeds.

    `paper_by` is the paper's difference, in nats per token.
    """
    ends = {name: [end(run) for run in runs[name]] for name in (lower, higher)}
    papers = [CONFIGURATIONS[name][0] for name in (lower, higher)]
    return {
        "lower": lower,
        "than": higher,
        "by": differences(ends[higher], ends[lower]),
        "paper_by": math.log(papers[1] / papers[0]) if all(papers) else None,
    }


def summary(name: str, size: dict, rates: dict[str, Rates], runs: dict[str, list[dict]]) -> dict:
    """Return a row of the table."""
    row = {
        "configuration": name,
        "parameters": cost_of(config_of(name, size), 1).parameters,
        **rates[name]._asdict(),
        "loss": by_seed(runs[name], 1),
        "seconds": interval([run["seconds"] for run in runs[name]]),
        **{circuit: interval([run[circuit] for run in runs[name]]) for circuit in CIRCUITS},
    }
    if "mha" in runs and name != "mha":
        row["lower_than_mha"] = difference(name, "mha", runs)
        for circuit in CIRCUITS:
            own, base = ([run[circuit] for run in runs[each]] for each in (name, "mha"))
            row[f"{circuit}_minus_mha"] = differences(own, base)
    return row


def plot(table: dict) -> Figure:
    """Plot the differences of losses from "mha", and how much more diverse the heads are.

    The paper's differences stand beside the measured ones."""
    compared = [row for row in table["rows"] if "lower_than_mha" in row]
    names = [row["configuration"] for row in compared]
    differences = [row["lower_than_mha"]["by"] for row in compared]
    decided = [each["mean"] < 0 for each in differences if each.get("p_holm", 1) < 0.05]
    message = (
        f"{decided.count(True)} of {len(names)} configurations end above 'mha' and {decided.count(False)} below "
        "(decided); in the paper each component ends below"
    )
    papers = [row["lower_than_mha"]["paper_by"] for row in compared]
    diversity = {name: points([row[f"{name}_minus_mha"] for row in compared]) for name in CIRCUITS}
    series = {
        "loss lower by, nats per byte\n(higher is better)": {"_": points(differences)},
        "the same in the paper's Table 9,\nnats per token": {"_": papers},
        "captured variance minus mha's\n(lower is more diverse)": diversity,
    }
    return plots.dot_panels(message, names, series, mark=0)[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    size = FULL if args.full else SMALL
    text = read_text()
    setting = setting_of(args, size, text)
    rates, runs = compare_tuned(
        args, setting, partial(one_run, size, text, args.device), partial(config_of, size=size)
    )
    rows = [summary(name, size, rates, runs) for name in args.kinds]
    claims = [difference(*claim, runs) for claim in CLAIMS if set(claim) <= set(args.kinds)]
    compared = [row for row in rows if "lower_than_mha" in row]
    correct_by_holm([each["by"] for each in (*(row["lower_than_mha"] for row in compared), *claims)])
    correct_by_holm([row[f"{circuit}_minus_mha"] for row in compared for circuit in CIRCUITS])
    write(args, plot, **setting, rows=rows, claims=claims)


if __name__ == "__main__":
    run_cli(main)

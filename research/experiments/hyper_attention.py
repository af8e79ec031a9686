"""Compare HyperFeatureAttention and HyperAttention with self-attention on the examples of their paper.

The paper is "A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions". The examples are coupled
features (Sections 5 and F.1), ternary synergies (Section 6), and the skip-trigram bug (Section G.2.1).

Coupled features: agents have 3 features of D values. An agent's value is the sum over all agents of a product of three
functions, one of each feature of the two. Linear HyperFeatureAttention (HFA) of order 3 should need a matrix for each
feature, 3 D^2 numbers, where linear self-attention (SA) needs one over all combinations, D^6. Both constructions run
in the package's layers. On the features side by side no number of heads of one layer of SA expresses the product: a
regression on the exact moments of all that such layers can say gives what remains.

Ternary synergies: agent i gains 1 for every pair (j, k) of its allies that are not allied with each other. Linear
HyperAttention (HA) of order 3 should express it for any number of agents. A regression on all pairwise interactions
gives what remains for SA.

Skip-trigrams: the last token of a sentence and one source among fillers together determine the next token, and each by
itself says nothing: the completions form a Latin square. The paper's example has 2 sources and 2 last tokens (keep ...
in mind, keep ... at bay). SA and HA with softmax are trained as one layer without an MLP. The bug is the probability
of completions that belong to the source with another last token.

The three tasks are also learned by training, in a few minutes of one core.

example: python -m research.experiments.hyper_attention
"""

import argparse
from collections.abc import Sequence

from common.command_io import run_cli
from research.experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return study_parser(__doc__, "hyper_attention", seeds=3).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure
from torch import nn

from common import plots
from research.experiments.bare_attention import BareAttention, relative_error
from research.experiments.study import begin, learned_rows, points, seeded, train, write


AGENTS = 8
VALUES = 4  # D, of each of 3 features
STATES = 6  # of an agent with allies
FILLERS, SENTENCE = 8, 8
STEPS, BATCH, REGRESSION_ROWS = 500, 64, 60000
OPTIONS = {"mha": {}, "hyper_feature": {"orders": 3}, "hyper": {"order": 3, "sharing": False}}
# The learned tasks: inputs and outputs of a token, and the width of a head; and their layers: kind and heads
TASKS = {
    "coupled features": (3 * VALUES, 1, 3 * VALUES),
    "ternary synergy": (STATES, 1, STATES**2),
    "skip-trigrams, 2 sources": (FILLERS + 4, 2, 16),
    "skip-trigrams, 8 sources": (FILLERS + 16, 8, 16),
}
LAYERS = {"SA, 1 head": ("mha", 1), "SA, 4 heads": ("mha", 4)}
HFA, HA = {"HFA, 1 head": ("hyper_feature", 1)}, {"HA, 1 head": ("hyper", 1)}


def bare(kind: str, width: int, heads: int, head_dim: int, linear: bool = True) -> BareAttention:
    """Return a linear layer, or one with a softmax."""
    core = "linear" if linear and kind == "mha" else "eager"
    options = {kind: {**OPTIONS[kind], "linear": linear}} if OPTIONS[kind] else {}
    return BareAttention(kind, width, heads, head_dim, core, attention_options=options)


def everyone(length: int) -> torch.Tensor:
    """Return the mask in which every token sees every other."""
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def unexplained(features: torch.Tensor, target: torch.Tensor) -> float:
    """Return the share of the variance of `target` [rows] that the best linear map of `features` [rows, any] leaves.

    The map is fitted on one half of the rows, and the share is measured on the other half.
    """
    half = len(target) // 2
    features = torch.cat((features, features.new_ones(len(target), 1)), dim=1)
    # The columns are not independent: those of a one-hot form add up to one.
    inverse = torch.linalg.pinv(features[:half].T @ features[:half], hermitian=True)
    fit = inverse @ (features[:half].T @ target[:half])
    return ((features[half:] @ fit - target[half:]).square().mean() / target[half:].var()).item()


# Coupled features


def feature_functions(values: int) -> torch.Tensor:
    """Return what a feature of one agent is worth to that of another, [3, D, D]; always the same."""
    return torch.randn(3, values, values, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def draw_features(*shape: int, values: int = VALUES) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the features of agents side by side in one-hot form, [*shape, 3 D], and their values, [*shape, 1]."""
    x = torch.eye(values, dtype=torch.float64)[torch.randint(values, (*shape, 3))]
    worth = torch.einsum("...iau,auv,...jav->...aij", x, feature_functions(values), x)
    return x.flatten(-2), worth.prod(dim=-3).sum(dim=-1, keepdim=True)


def combinations(x: torch.Tensor) -> torch.Tensor:
    """Turn features side by side, [..., 3 D], into one of D^3 combinations, [..., D^3]."""
    first, second, third = x.unflatten(-1, (3, -1)).unbind(-2)
    return torch.einsum("...u,...v,...w->...uvw", first, second, third).flatten(-3)


def set_weights(layer: BareAttention, query: torch.Tensor, key: torch.Tensor, constant: int) -> BareAttention:
    """Give a layer these queries and keys, and every token the value 1 in the first channel.

    That value is the sum of the first `constant` inputs of a token, of which one is 1.
    """
    with torch.no_grad():
        layer.layer.q_proj.weight.copy_(query)
        layer.layer.k_proj.weight.copy_(key)
        layer.layer.v_proj.weight.zero_()
        layer.layer.v_proj.weight[0, :constant] = 1
    return layer


def constructed_hfa(values: int) -> BareAttention:
    """Return HFA of order 3: its a-th query picks feature a, its a-th key holds the function of feature a."""
    layer = bare("hyper_feature", 3 * values, 1, 3 * values).double()
    # Each of the three factors is divided by sqrt(D).
    query = torch.eye(3 * values, dtype=torch.float64) * values**0.5
    return set_weights(layer, query, torch.block_diag(*feature_functions(values)), values)


def constructed_sa(values: int) -> BareAttention:
    """Return SA on the combinations of features: its keys hold the interaction of all of them."""
    first, second, third = feature_functions(values)
    interaction = torch.kron(torch.kron(first, second), third)
    layer = bare("mha", values**3, 1, values**3).double()
    return set_weights(layer, torch.eye(values**3), interaction, values**3)


@torch.no_grad()
def feature_row(values: int) -> dict:
    """Return the errors of both constructions, and the numbers they hold in interactions and values."""
    x, expected = draw_features(4, AGENTS, values=values)
    outputs = {
        "HFA": constructed_hfa(values)(x, everyone(AGENTS))[..., :1],
        "SA": constructed_sa(values)(combinations(x))[..., :1],
    }
    return {
        "values_of_a_feature": values,
        "error": {name: relative_error(output, expected) for name, output in outputs.items()},
        "parameters": {"HFA": 3 * values**2 + 3 * values, "SA": values**6 + values**3},
    }


def features_unexplained() -> float:
    """Return the share of the variance that one layer of linear SA, on features side by side, leaves at best.

    With any number of heads its output at token i is a sum over all tokens j of a function that is linear in the
    features of i, and quadratic in those of j. The moments are exact: those of independent and uniform features.
    """
    state = torch.eye(VALUES**3, dtype=torch.float64)
    x = torch.cartesian_prod(*[torch.arange(VALUES)] * 3)
    x = torch.eye(VALUES, dtype=torch.float64)[x].flatten(1)  # [states, 3 D]
    quadratic = torch.einsum("su,sv->suv", x, x).flatten(1)
    first, second, third = feature_functions(VALUES)
    worth = torch.kron(torch.kron(first, second), third)  # [states of i, states of j]

    # By the state of i: the mean and the covariance of how many tokens are in each state.
    others, chance = AGENTS - 1, 1 / len(state)
    mean = state + others * chance
    covariance = others * (chance * state - chance**2)
    second_moment = covariance + torch.einsum("sa,sb->sab", mean, mean)
    goal = torch.einsum("sa,sa->s", worth, mean)
    products = torch.einsum("av,sab,bw->svw", quadratic, second_moment, quadratic)
    gram = chance * torch.einsum("su,sx,svw->uvxw", x, x, products).flatten(2).flatten(0, 1)
    with_goal = torch.einsum("av,sab,sb->sv", quadratic, second_moment, worth)
    cross = chance * torch.einsum("su,sv->uv", x, with_goal).flatten()
    explained = cross @ torch.linalg.pinv(gram, hermitian=True) @ cross
    square = chance * torch.einsum("sa,sab,sb->", worth, second_moment, worth)
    return ((square - explained) / (square - (chance * goal.sum()) ** 2)).item()


# Ternary synergies


def synergy() -> torch.Tensor:
    """Return f[i, j, k] of three states: 1 where i is allied with j and with k, and j and k are not allied."""
    drawn = torch.rand(STATES, STATES, generator=torch.Generator().manual_seed(0)) < 0.5
    ally = (drawn.triu() | drawn.triu().T).double()
    return torch.einsum("ij,ik,jk->ijk", ally, ally, 1 - ally)


def draw_synergy(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the states of agents in one-hot form, [*shape, states], and what they gain, [*shape, 1]."""
    x = torch.eye(STATES, dtype=torch.float64)[torch.randint(STATES, shape)]
    counts = x.sum(dim=-2)
    gain = torch.einsum("...ia,abc,...b,...c->...i", x, synergy(), counts, counts)
    return x, gain.unsqueeze(-1)


def constructed_ha() -> BareAttention:
    """Return linear HA of order 3: channel (b, c) of the query holds f[., b, c]; the keys pick the states b and c."""
    layer = bare("hyper", STATES, 1, STATES**2).double()
    query = synergy().flatten(1).T * STATES  # the query is divided by sqrt(head_dim)
    pick = torch.eye(STATES, dtype=torch.float64)
    key = torch.cat((pick.repeat_interleave(STATES, dim=0), pick.repeat(STATES, 1)))
    layer = set_weights(layer, query, key, STATES)
    with torch.no_grad():
        layer.layer.v_proj.weight[STATES**2] = 1  # of the second token
    return layer


@torch.no_grad()
def synergy_errors() -> dict[int, float]:
    """Return the construction's error by number of agents."""
    drawn = {agents: draw_synergy(8, agents) for agents in (2, AGENTS, 30)}
    layer = constructed_ha()
    return {agents: relative_error(layer(x, everyone(agents))[..., :1], gain) for agents, (x, gain) in drawn.items()}


def synergy_unexplained() -> float:
    """Return what one layer of linear SA with any number of heads leaves: pairwise interactions of any form."""
    x, gain = draw_synergy(REGRESSION_ROWS, AGENTS)
    return unexplained(torch.einsum("ba,bc->bac", x[:, 0], x.sum(dim=1)).flatten(1), gain[:, 0, 0])


# Skip-trigrams


def draw_trigrams(*shape: int, sources: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sentences in one-hot form, [*shape, SENTENCE, words], and their completions, int [*shape].

    The words are the fillers, the sources and as many last tokens. The completion of source s and last token t is
    s + t modulo their number.
    """
    words = torch.randint(FILLERS, (*shape, SENTENCE))
    source, last = torch.randint(sources, (2, *shape))
    place = torch.randint(SENTENCE - 1, (*shape, 1))
    words.scatter_(-1, place, FILLERS + source.unsqueeze(-1))
    words[..., -1] = FILLERS + sources + last
    return torch.eye(FILLERS + 2 * sources)[words], (source + last) % sources


# Learned


class OneLayer(nn.Module):
    """Put a linear readout on a bare layer: of every token after a linear layer, of the last one after a softmax."""

    def __init__(self, task: str, kind: str, heads: int):
        super().__init__()
        width, outputs, head_dim = TASKS[task]
        self.linear = not task.startswith("skip-trigrams")
        self.attention = bare(kind, width, heads, head_dim, self.linear)
        self.readout = nn.Linear(heads * head_dim, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, N, outputs] of [batch, N, width], or [batch, outputs] of the last token, which sees all."""
        states = self.attention(x, everyone(x.shape[1]) if self.linear else None)
        return self.readout(states if self.linear else states[:, -1])


def learned(task: str, layer: str, seeds: list[int]) -> dict:
    """Train layers for a task.

    The error on new inputs is the share of the variance that is left, or the mean probability of wrong completions.
    """
    models = seeded(seeds, lambda: OneLayer(task, *layers(task)[layer]))
    is_regression = models[0].linear

    def draw(rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_regression:
            return draw_trigrams(len(seeds), rows, sources=TASKS[task][1])
        x, target = (draw_features if task == "coupled features" else draw_synergy)(len(seeds), rows, AGENTS)
        return x.float(), ((target - mean) / deviation).float()

    mean, deviation = 0.0, 1.0
    sample = draw(4096)[1].float()
    mean, deviation = sample.mean(), sample.std()
    loss = nn.functional.mse_loss if is_regression else nn.functional.cross_entropy
    trained = train(models, draw, loss, STEPS, rate=1e-2)
    x, target = draw(2048)
    outputs = trained(x)
    if is_regression:
        errors = (outputs - target).square()
    else:
        errors = 1 - outputs.softmax(dim=-1).gather(-1, target.unsqueeze(-1))
    parameters = sum(weight.numel() for weight in models[0].attention.parameters())
    return {"error": errors.flatten(1).mean(dim=1).tolist(), "parameters": parameters}


def layers(task: str) -> dict[str, tuple[str, int]]:
    """Return the layers that are trained for a task."""
    return LAYERS | (HFA if task == "coupled features" else HA)


def plot(table: dict) -> Figure:
    """Plot the parameters of the constructions, and the learned layers' errors from lowest to highest seed."""
    rows, features = table["learned"], table["constructed_for_coupled_features"]
    tasks, series = list(dict.fromkeys(row["task"] for row in rows)), {}
    for row in rows:
        name = row["layer"] if row["layer"].startswith("SA") else "HFA or HA, 1 head"
        series.setdefault(name, [None] * len(tasks))[tasks.index(row["task"])] = row["error"]
    *others, hyper = series.values()
    less = sum(ours["mean"] < min(each["mean"] for each in theirs) for ours, *theirs in zip(hyper, *others))
    message = (
        f"Learned, hyper attention (HFA, HA) leaves less than self-attention (SA) in {less} of {len(tasks)} tasks; "
        "constructed, it takes fewer parameters"
    )
    figure, (parameters, errors) = plots.panels(message, 2, height=3)
    for name, style in (("SA", "C0o-"), ("HFA", "C2D-")):
        found = [(row["values_of_a_feature"], row["parameters"][name]) for row in features]
        parameters.loglog(*zip(*found), style, label=name)
    parameters.set(title="constructed, exact for coupled features", xlabel="values of a feature, D")
    parameters.set(ylabel="parameters (fewer is better)")
    parameters.legend()
    plots.ticks(parameters, "x", [row["values_of_a_feature"] for row in features])
    plots.dots(errors, tasks, {name: points(values) for name, values in series.items()})
    errors.set(title="learned", xscale="log")
    errors.set_xlabel("variance left, or probability of wrong completions,\nall seeds (lower is better)")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results."""
    args = parse_arguments(argv)
    begin(args)
    torch.manual_seed(args.seeds[0])
    features = [feature_row(values) for values in (2, 4, 8)]
    synergies = synergy_errors()
    remains = {"coupled features": features_unexplained(), "ternary synergy": synergy_unexplained()}
    cases = ({"task": task, "layer": layer} for task in TASKS for layer in layers(task))
    rows = learned_rows(args, learned, cases, STEPS)
    tables = {
        "constructed_for_coupled_features": features,
        "constructed_for_synergies_error_by_agents": synergies,
        "unexplained_by_any_self_attention": remains,
        "learned": rows,
    }
    write(args, plot, seeds=args.seeds, steps=STEPS, **tables)


if __name__ == "__main__":
    run_cli(main)

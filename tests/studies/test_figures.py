"""Compare every figure that a document takes from a study with the table of the study.

The phrases of a section are made from the tables, and each must stand in the section. What is left then holds no
figure but those listed as given: of the set-up and of the papers.
"""

import json
import re
from copy import deepcopy
from functools import cache
from importlib import import_module
from statistics import fmean

import pytest

from common import plots
from common.command_io import ROOT, read_json
from experiments import equal_cache, language_models, relation_composition, warm_start, warm_start_variants
from experiments.protocol import BUDGETS, COUNTS, budgets
from experiments.redraw import STUDIES, TABLES, study_of
from experiments.study import correct_by_holm, detectable, differences, interval
from kinds.model_cost import model as cost_of_model
from kinds.model_cost import with_mha
from modeling_iha import IHAConfig
from modeling_iha.package import flop_matched_window


RESULTS = ROOT / "experiments" / "results"


@cache
def table(study: str) -> dict:
    return json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))


def rows(study: str, name: str, part: str = "rows") -> dict:
    return {row[name]: row for row in table(study)[part]}


def text(value: dict, digits: int = 3, sign: int = 1) -> str:
    """Return an interval as the documents write it."""
    return f"{sign * value['mean']:.{digits}f} ± {value['half_width']:.{digits}f}"


def percent(value: dict, digits: int = 1) -> str:
    return text({name: 100 * value[name] for name in ("mean", "half_width")}, digits)


def span(values: list[float], form: str, joint: str = " to ") -> str:
    return joint.join(format(value, form) for value in (min(values), max(values)))


def short(p_value: float) -> str:
    """Return a p-value with one digit, above 0.1 with two, and with as many as tell it from 0.05."""
    one = f"{p_value:.2f}" if p_value > 0.1 else f"{p_value:.1g}"
    return f"{p_value:.2g}" if one == "0.05" else one


def line(*cells: str) -> str:
    return " ".join(f"| {' | '.join(cells)} |".split())


# Phrases of experiments/README.md, by section


def warm_start_phrases() -> list[str]:
    mha, iha = table("warm_start")["rows"]
    less = differences(mha["loss"]["values"], iha["loss"]["values"])
    before = table("warm_start")["correct_before"]
    fewer = differences(mha["accuracy"]["values"], iha["accuracy"]["values"])
    return [
        f"a gain of up to {less['mean'] + less['half_width']:.3f} nats",
        f"a loss of up to {less['half_width'] - less['mean']:.3f}",
        f"fell from {mha['start_loss']['mean']:.2f} to {mha['loss']['mean']:.4f} (SmolLM2) and "
        f"{iha['loss']['mean']:.4f} (IHA)",
        f"lower by {text(less, 4)}",
        f"SmolLM2 has {percent(mha['accuracy'])}% of them right, IHA {percent(iha['accuracy'])}%, and "
        f"{100 * sum(before.values()) / (len(before) * warm_start.TEST_ROWS):.1f}% were right before",
        f"IHA has {percent(fewer)} points less",
    ]


def variant_losses(name: str, relations: str | None = None) -> list[float]:
    """Return the loss of each seed, of all questions or of a number of relations."""
    runs = [run["test"] for run in table("warm_start_variants")["runs"] if run["variant"] == name]
    return [fmean(run[each]["loss"] for each in ([relations] if relations else run)) for run in runs]


def right_answers(name: str) -> list[int]:
    runs = [run["test"] for run in table("warm_start_variants")["runs"] if run["variant"] == name]
    return [sum(part["correct"] for part in run.values()) for run in runs]


def pseudo_head_use(name: str, part: str, head: slice) -> list[float]:
    return [share for layer in rows("warm_start_variants", "variant")[name]["use"][part] for share in layer[head]]


def variants_phrases() -> list[str]:
    by_name, phrases = rows("warm_start_variants", "variant"), []
    for name, row in by_name.items():
        compared = row.get("minus_mha")
        seeds = [
            " ".join(f"{100 * share:.0f}" for share in part["accuracy"]["values"])
            for part in row["relations"].values()
        ]
        apart = (text(compared), short(compared["p_holm"])) if compared else ("", "")
        phrases.append(line(f"`{name}`", text(row["loss"]), *apart, percent(row["accuracy"]), *seeds))
    four = by_name["iha_4"]["minus_mha_x2"]
    compared = [row[key] for row in by_name.values() for key in ("minus_mha", "minus_mha_x2") if key in row]
    again = deepcopy(compared)
    correct_by_holm(again)
    assert compared == again and [each["p_holm"] < 0.05 for each in compared].count(True) == 2
    more = [iha - mha for iha, mha in zip(right_answers("iha_2"), right_answers("mha"))]
    by_relations = [
        text(differences(variant_losses("mha", number), variant_losses("iha_4", number))) for number in "123"
    ]
    start = {name: [run["train"][0][1] for run in runs_of(name)] for name in ("noise", "iha_2")}
    higher = [noise - balanced for noise, balanced in zip(start["noise"], start["iha_2"])]
    before = fmean(part["loss"] for part in table("warm_start_variants")["before"].values())
    entries = {name: moved_entries(by_name[name]) for name in ("iha_2", "x200")}
    return [
        *phrases,
        f"The {len(compared)} differences",
        f"P = 4 comes closest (p = {short(by_name['iha_4']['minus_mha']['p_holm'])})",
        f"three seeds find an effect of {detectable(four):.2f} nats in 80% of the cases, and "
        f"{abs(four['mean']):.3f} was seen",
        f"the loss is {before:.2f} and no answer is right (seed 0)",
        f"`iha_2` minus `mha_x2`: {text(by_name['iha_2']['minus_mha_x2'])}, `iha_4`: {text(four)}",
        f"`iha_2` has {sum(more)} more right than `mha`, of which {more[0]} are of seed 0",
        f"by {by_relations[0]}, {by_relations[1]} and {by_relations[2]} nats",
        f"each takes {span(pseudo_head_use('zero', 'attention', slice(None)), '.2%')} of the attention",
        f"balanced start by {text(differences(variant_losses('zero'), variant_losses('iha_2')))}",
        f"a loss {span(higher, '.2f')} higher at the first step and ends "
        f"{text(differences(variant_losses('noise'), variant_losses('iha_2')))} above",
        f"from {before:.2f} to {by_name['mixing_only']['loss']['mean']:.2f} with the backbone frozen",
        f"moved by {fmean(entries['iha_2']):.3f} on average ({span(entries['iha_2'], '.3f')}, ",
        f"by {fmean(entries['x200']):.2f} ({span(entries['x200'], '.3f')})",
        f"keeps {span(pseudo_head_use('iha_2', 'collapse', slice(-1, None)), '.1%')} of its weight on the last one",
        f"(`iha_4` {span(pseudo_head_use('iha_4', 'collapse', slice(-1, None)), '.1%')}, "
        f"`x200` {span(pseudo_head_use('x200', 'collapse', slice(-1, None)), '.1%')})",
        f"all are used: {span(pseudo_head_use('iha_2', 'attention', slice(None)), '.0%')} of a layer's attention "
        f"each, {span(pseudo_head_use('iha_4', 'attention', slice(None)), '.0%')} with P = 4, "
        f"{span(pseudo_head_use('x200', 'attention', slice(None)), '.0%')} with `x200`",
    ]


def runs_of(name: str) -> list[dict]:
    return [run for run in table("warm_start_variants")["runs"] if run["variant"] == name]


def moved_entries(row: dict) -> list[float]:

    def flat(value):
        return [value] if isinstance(value, float) else [entry for part in value for entry in flat(part)]

    return flat(list(row["moved"].values()))


def rate_phrases() -> list[str]:
    best = [
        min((row for row in table("mixing_rate")["rows"] if row["learning_rate"] == rate), key=lambda row: row["loss"])
        for rate in (5e-5, 1.25e-5)
    ]
    first, second = (f"({row['multiple']:.0f} times" for row in best)
    return [
        f"Beside 5e-5 for the backbone {best[0]['mixing_learning_rate'] * 1e3:.0f}e-3 was the best",
        f"{first} the backbone's; held-out loss {best[0]['loss']:.3f})",
        f"{second}; {best[1]['loss']:.3f})",
    ]


def theorem_2_phrases() -> list[str]:
    found = table("theorem2_inclusion")

    def highest(setting: str, *selected: str) -> float:
        chosen = [r for r in found["inclusion"] if r["setting"] == setting and r["selected"] in selected]
        return max(row["error"]["max"] for row in chosen)

    first = {r["pseudo_heads"]: r for r in found["inclusion"] if (r["setting"], r["selected"]) == ("causal", "first")}
    bends = found["nonlinearity_on_repeated_tokens"]
    return [
        f"IHA equals MHA to {highest('no mask', 'first', 'last'):.0e}",
        f"only the last one can ({highest('causal', 'last'):.0e})",
        f"off by {first[2]['error']['max']:.0%} (P = 2) to {first[8]['error']['max']:.0%} (P = 8)",
        f"({bends['IHA, Appendix B.1']['mean']:.0e}, the mean over seeds)",
        f"differ by {bends['IHA, Section 4.1']['mean']:.0%} (mean)",
    ]


def theorem_3_phrases() -> list[str]:
    found = table("polynomial_filters")
    errors = [max(row["largest_relative_error"].values()) for row in found["exactness"]]
    learned = {(row["kind"], row["heads"]): row for row in found["learned"]}
    counts = {(row["kind"], row["k"]): row for row in found["counts"]}
    ranks = {row["graph"]: row["distinct_eigenvalues"] for row in found["exactness"]}
    return [
        f"to {max(errors):.1e} of the largest entry",
        f"{counts['mha', 25]['heads']} heads and {counts['mha', 25]['parameters']:,} parameters for MHA, "
        f"{counts['iha', 25]['heads']} and {counts['iha', 25]['parameters']:,} for IHA",
        f"{ranks['karate club']} on the karate club, but {ranks['6 x 6 grid']} on the grid",
        *(cell(row["error"]) for row in learned.values()),
        f"3 heads of IHA ({learned['iha', 3]['parameters']:,} parameters) do better than 5 of MHA "
        f"({learned['mha', 5]['parameters']:,}) and worse than 7 ({learned['mha', 7]['parameters']:,}), "
        f"4 ({learned['iha', 4]['parameters']:,}) as well as 7 or 8",
    ]


def cell(error: dict) -> str:
    """Return a mean with its lowest and highest seed to two digits."""

    def digits(value: float) -> str:
        return f"{value:.0e}".replace("e-0", "e-") if value < 1e-4 else f"{value:#.2g}"

    return f"{digits(error['mean'])} ({digits(error['min'])}-{digits(error['max'])})"


def theorem_4_phrases() -> list[str]:
    found = table("cpm3")
    learned = {(row["kind"], row["heads"]): row for row in found["learned"]}
    counts = {(row["kind"], row["length"]): f"{row['attention_parameters']:,}" for row in found["counts"]}

    def left(kind: str, heads: int) -> str:
        return f"{learned[kind, heads]['unexplained']['mean']:.3f}"

    def range_of(kind: str, heads: int) -> str:
        value = learned[kind, heads]["unexplained"]
        return f"{value['min']:.3f}-{value['max']:.3f}"

    right = [row["right"][end] for row in found["learned"] for end in ("min", "max")]
    return [
        f"from N = {found['first_length_with_fewer_parameters_by_the_bounds']} on",
        f"({counts['iha', 4]} against {counts['mha', 4]} at N = 4; {counts['iha', 25]} against {counts['mha', 25]} "
        "at N = 25)",
        f"(by up to {found['largest_difference_with_a_token_less']['4']:.0f} at N = 4)",
        f"MHA with 1, 2, 3 and 9 heads {left('mha', 1)}, {left('mha', 2)}, {left('mha', 3)} and {left('mha', 9)}, "
        f"IHA with 2 and 3 heads {left('iha', 2)} and {left('iha', 3)}",
        f"({range_of('iha', 3)} against {range_of('mha', 3)})",
        f"9 heads of MHA ({range_of('mha', 9)})",
        f"{min(right):.0%} to {max(right):.0%} of the counts are right",
    ]


def hyper_phrases() -> list[str]:
    found = table("hyper_attention")
    learned = {(row["task"], row["layer"]): row["error"] for row in found["learned"]}
    numbers = {row["values_of_a_feature"]: row["parameters"] for row in found["constructed_for_coupled_features"]}
    features, synergy = "coupled features", "ternary synergy"
    coupled, ternary = (found["unexplained_by_any_self_attention"][name] for name in (features, synergy))
    eight, sources = "skip-trigrams, 8 sources", learned["skip-trigrams, 2 sources", "SA, 1 head"]
    hfa = learned[features, "HFA, 1 head"]

    def mean(task: str, layer: str) -> float:
        return learned[task, layer]["mean"]

    return [
        f"{numbers[4]['HFA']} against {numbers[4]['SA']:,} for D = 4, {numbers[8]['HFA']} against "
        f"{numbers[8]['SA']:,} for D = 8",
        f"at least {coupled:.1%} of the variance",
        f"HFA leaves {hfa['mean']:.0%} ({hfa['min']:.0%} to {hfa['max']:.0%}), SA with 1 head "
        f"{learned[features, 'SA, 1 head']['mean']:.0%}, with 4 heads {learned[features, 'SA, 4 heads']['mean']:.0%}",
        f"{ternary:.1%} of the variance is no pairwise interaction",
        f"HA leaves {mean(synergy, 'HA, 1 head'):.2%}, SA {mean(synergy, 'SA, 1 head'):.1%} with 1 head and "
        f"{mean(synergy, 'SA, 4 heads'):.0%} with 4",
        f"(wrong ones get {sources['min']:.2%}; {sources['max']:.0%} in the third)",
        f"wrong completions get {mean(eight, 'SA, 1 head'):.0%} from 1 head of SA (87.5% is chance), "
        f"{mean(eight, 'SA, 4 heads'):.0%} from 4 heads, and {mean(eight, 'HA, 1 head'):.2%} from 1 head of HA",
    ]


def agents_phrases() -> list[str]:
    found = table("colliding_agents")["rows"]
    largest = {
        "training": max(row["training_error"] for row in found),
        "test": max(max(row["test_error_by_agents"].values()) for row in found),
        "T": max(row["mean_squared_difference_from_constructed"]["T"] for row in found) ** 0.5,
    }
    return [
        f"at most {short_power(largest['training'])} in training",
        f"at most {short_power(largest['test'])} in tests with 2 to 60 agents",
        f"T is the constructed one to {short_power(largest['T'])} (root mean square)",
    ]


def short_power(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


def relation_phrases() -> list[str]:
    found = {(r["task"], f"{r['rate']:g}", r["kind"]): r for r in table("relation_composition")["rows"]}
    phrases = []
    for task in ("binary", "ternary"):
        for rate, shown in (("0.004", "4e-3"), ("0.001", "1e-3")):
            of_kind = {kind: found[task, rate, kind] for kind in ("mha", "iha", "simplicial")}
            accuracies = [percent(row["accuracy"]) for row in of_kind.values()]
            higher = [percent(of_kind[kind]["iha_is_higher_by"]) for kind in ("mha", "simplicial")]
            phrases.append(line(f"{task}, {shown}", *accuracies, *higher))
    p_values = [row["iha_is_higher_by"]["p_holm"] for row in found.values() if row["kind"] == "simplicial"]
    first, second, third = (short(p_value) for p_value in p_values if p_value < 0.05)
    return [*phrases, f"(p = {first}, {second} and {third})"]


def with_p(value: dict, digits: int = 3) -> str:
    """Return a difference with its corrected p-value, as the tables of the document write it."""
    return f"{text(value, digits)} (p = {short(value['p_holm'])})"


def compared_phrases(study: str) -> list[str]:
    """Return for every row its differences from the base, and those from its control, by budget."""
    phrases = []
    for row in table(study)["rows"]:
        for key, other in (("minus_base", table(study)["rows"][0]["variant"]), ("minus_control", row["control"])):
            if key in row:
                found = [row[key].get(budget) for budget in BUDGETS]
                cells = [with_p(each["difference"]) if each else "–" for each in found]
                costs = [f"{each['cost']:.2f}" if each else "–" for each in found[1:]]
                phrases.append(line(f"`{row['variant']}` - `{other}`", *cells, *costs))
    return phrases


def losses(study: str) -> str:
    found = (f"`{row['variant']}` {text(row['loss'])} ({row['rate']:g})" for row in table(study)["rows"])
    return ", ".join(found)


def undecided_by_the_times_of_each_seed(study: str) -> tuple[list[str], int]:
    """Return what equal time no longer decides with the error of the time, and how many it decides without."""
    found, compared, decided = rows(study, "variant"), [], {}
    for name, row in found.items():
        for key, other in (("minus_base", next(iter(found))), ("minus_control", row["control"])):
            if "time" in row.get(key, {}):
                by_times = (budgets(of_seed, name, other, (1.0, 1.0))["time"] for of_seed in by_seed(study))
                ends = interval([each["difference"]["mean"] for each in by_times])
                compared += [*(deepcopy(row[key][budget]["difference"]) for budget in BUDGETS[:-1]), ends]
                if row[key]["time"]["difference"]["p_holm"] < 0.05:
                    decided[f"`{name}` - `{other}`"] = compared[-1]
    correct_by_holm(compared)
    return [f"{pair} {with_p(again)}" for pair, again in decided.items() if again["p_holm"] > 0.05], len(decided)


def by_seed(study: str) -> list[dict[str, list[dict]]]:
    """Return for each seed the run of every variant, as the only one."""
    seconds = {name: row["seconds"]["values"] for name, row in rows(study, "variant").items()}
    return [
        {
            name: [{"curve": curves[seed], "seconds": seconds[name][seed]}]
            for name, curves in table(study)["runs"].items()
        }
        for seed in range(6)
    ]


def language_phrases() -> list[str]:
    tables = ("language_models", "language_models_512")
    (first, one), (second, two) = map(undecided_by_the_times_of_each_seed, tables)
    assert len(first) == 2 and not second
    short_rows, long_rows = (rows(name, "variant")["iha_4"] for name in tables)

    def both(key: str, budget: str, sign: int = 1) -> list[str]:
        return [text(row[key][budget]["difference"], sign=sign) for row in (short_rows, long_rows)]

    ahead, behind = both("minus_base", "FLOPs", -1), both("minus_control", "FLOPs")
    papers = COUNTS["paper"]
    more, less = both("minus_base", papers, -1), both("minus_control", papers)
    beside = both("minus_control", "steps", -1)
    narrow = rows("language_models", "variant")["global_local_32"]["minus_control"]["steps"]["difference"]
    return [
        f"(by {beside[0]} with rows of 256 bytes, {beside[1]} with rows of 512)",
        f"{text(narrow)} behind P = 4 (p = {short(narrow['p_holm'])})",
        f"P = 4 is {ahead[0]} ahead of `mha` with rows of 256 and {ahead[1]} with rows of 512, and {behind[0]} and "
        f"{behind[1]} behind",
        f"P = 4 is {more[0]} and {more[1]} ahead of `mha`, and {less[0]} and {less[1]} behind",
        *(phrase for name in tables for phrase in (*compared_phrases(name), losses(name))),
        f"two of the {one + two} that are decided",
        " and ".join(first),
    ]


def cache_phrases() -> list[str]:
    prices = [
        line(f"`{row['variant']}`", f"{row['cached_bytes']:,}", f"{1000 * row['seconds_per_token']:.1f}")
        for row in table("equal_cache")["rows"]
    ]
    return [*compared_phrases("equal_cache"), losses("equal_cache"), *prices]


def ladder_phrases() -> list[str]:
    found = {(row["task"], row["variant"], row["k"]): row["right"] for row in table("ladder")["rows"]}
    (four,) = (row for row in table("ladder")["rows"] if (row["variant"], row["k"]) == ("mha 4", 4))
    return [
        *(
            line(task, variant, *(text(found[task, variant, k], 2) for k in (2, 4, 8)))
            for task, variant in dict.fromkeys(key[:2] for key in found)
        ),
        f"on both seeds of its tuning ({1 - dict(four['tried'])[four['rate']]:.3f} right)",
    ]


def tasks_phrases() -> list[str]:
    by_kind, phrases = rows("dcmha_tasks", "kind"), []
    patterns = ("same person", "other person", "who", "who not", "not the named", "different")
    for kind, row in by_kind.items():
        groups = row["groups"]
        name = "`iha`, P = 2" if kind == "iha" else f"`{kind}`"
        means = [f"{groups[pattern]['seen']['mean']:.2f}" for pattern in patterns]
        phrases.append(line(name, *(text(groups["all"][part], 2) for part in ("seen", "new")), *means))
    groups = {kind: row["groups"] for kind, row in by_kind.items()}
    compared = [
        value
        for of_kind in groups.values()
        for group in of_kind.values()
        for name, value in group.items()
        if name.endswith("_more_than_mha")
    ]
    decided = {
        (kind, name)
        for kind, of_kind in groups.items()
        for name, group in of_kind.items()
        for part in ("seen", "new")
        if group.get(f"{part}_more_than_mha", {}).get("p_holm", 1) < 0.05
    }
    assert len(compared) == 224
    ahead = {kind: sum(name == kind for name, _ in decided) for kind in by_kind}
    seen, new = (groups["dcmha"]["all"][f"{part}_more_than_mha"] for part in ("seen", "new"))
    who = groups["dcmha"]["who"]
    more = {kind: groups[kind]["all"]["seen_more_than_mha"] for kind in by_kind if kind != "mha"}
    assert {kind for kind, value in more.items() if value["p_holm"] < 0.05} == {"dcmha", "diff_v2", "multi_token"}
    seconds = {kind: row["seconds"]["mean"] / by_kind["mha"]["seconds"]["mean"] for kind, row in by_kind.items()}
    return [
        *phrases,
        ", ".join(f"`{kind}` {row['rate']:g}" for kind, row in by_kind.items()),
        f"({by_kind['knocking_heads']['mixing']:g} times it for `knocking_heads`, "
        f"{by_kind['multi_token']['mixing']:g} for `multi_token`)",
        f"has {text(seen, 2)} more of the examples of seen pairs right than `mha` (p = {short(seen['p_holm'])})",
        f"has {text(who['seen_more_than_mha'], 2)} more of the examples of seen pairs right than `mha` "
        f"(p = {short(who['seen_more_than_mha']['p_holm'])})",
        f"{text(new, 2)} more new examples right (p = {short(new['p_holm'])})",
        f"`multi_token` has {text(more['multi_token'], 2)} more (p = {short(more['multi_token']['p_holm'])})",
        f"ahead in {ahead['dcmha']} of {len(groups['dcmha'])} groups of tasks, seen or new, and `multi_token` in "
        f"{ahead['multi_token']}",
        f"does not find ({groups['dcmha']['different']['seen']['mean']:.2f}) and `multi_token` does "
        f"({groups['multi_token']['different']['seen']['mean']:.2f})",
        f"`diff_v2` has {text(more['diff_v2'], 2)} more of the examples of seen pairs right than `mha` "
        f"(p = {short(more['diff_v2']['p_holm'])})",
        f"`talking_heads` ({text(more['talking_heads'], 2)} more), `iha` ({text(more['iha'], 2)}), `gated` "
        f"({text(more['gated'], 2)}) and `knocking_heads` ({text(more['knocking_heads'], 2)}) are undecided",
        f"`dcmha` takes {seconds['dcmha']:.2f} times as long as one of `mha`, and one of `multi_token` "
        f"{seconds['multi_token']:.2f} times",
    ]


def ablation_phrases() -> list[str]:
    by_name, phrases = rows("dcmha_ablation", "configuration"), []
    for name, row in by_name.items():
        cells = [f"{row['parameters']:,}", f"{row['rate']:g}", text(row["loss"])]
        if name != "mha":
            apart = row["lower_than_mha"]
            paper = "" if apart["paper_by"] is None else f"{apart['paper_by']:.3f}"
            cells += [text(apart["by"]), paper, text(row["QK_minus_mha"]), text(row["OV_minus_mha"])]
        phrases.append(line(*cells))
    claims = {(claim["lower"], claim["than"]): claim for claim in table("dcmha_ablation")["claims"]}

    def by(*names: str, sign: int = 1) -> str:
        return text(claims[names]["by"], sign=sign)

    losses = {name: row["lower_than_mha"]["by"] for name, row in by_name.items() if name != "mha"}
    decided = {name for name, value in losses.items() if value["p_holm"] < 0.05}
    assert decided == {"projection", "gate", "all", "dcmha", "key", "post", "rank_1", "rank_4"} and len(losses) == 12
    assert all(losses[name]["mean"] < 0 for name in decided) and abs(losses["wider"]["mean"]) < 0.01
    assert {each for each, claim in claims.items() if claim["by"]["p_holm"] < 0.05} == {
        ("dcmha", "static"),
        ("dcmha", "wider"),
    }
    circuits = {(n, c): r[f"{c}_minus_mha"] for n, r in by_name.items() for c in ("QK", "OV") if n != "mha"}
    decided = {key for key, value in circuits.items() if value["p_holm"] < 0.05}
    more_diverse = ("projection", "all", "dcmha", "query", "key", "pre", "rank_1", "rank_4")
    assert decided == {*((name, "QK") for name in more_diverse), ("rank_4", "OV"), ("static", "OV")}
    assert all(circuits[name, "QK"]["mean"] < 0 for name in more_diverse) and len(circuits) == 24
    static, wider = claims["dcmha", "static"], claims["dcmha", "wider"]
    return [
        *phrases,
        f"`dcmha` ends {text(losses['dcmha'], sign=-1)} nats per byte above `mha`",
        f"above it by {text(wider['by'], sign=-1)} (p = {short(wider['by']['p_holm'])})",
        f"better than `dcmha` by {text(static['by'], sign=-1)} (p = {short(static['by']['p_holm'])}; in the paper "
        f"worse by {static['paper_by']:.3f})",
        f"better than gates by {by('projection', 'gate')} (in the paper "
        f"{claims['projection', 'gate']['paper_by']:.3f})",
        f"better than after it by {by('post', 'pre', sign=-1)} (worse by {claims['post', 'pre']['paper_by']:.3f})",
        f"query's side alone by {by('dcmha', 'query')}, the key's side alone by {by('dcmha', 'key')}, R = 1 by "
        f"{by('dcmha', 'rank_1')}, R = 4 by {by('dcmha', 'rank_4')}",
        f"`dcmha` (by {text(circuits['dcmha', 'QK'], sign=-1)})",
        f"`rank_4` (by {text(circuits['rank_4', 'OV'], sign=-1)}) and more for `static` (by "
        f"{text(circuits['static', 'OV'])})",
    ]


def diversity_phrases() -> list[str]:
    source, converted = table("head_diversity")["rows"]
    qk, ov = source["QK"], source["OV"]
    assert abs(converted["QK"]["mean"] - qk["mean"]) < 1e-4
    return [
        f"{qk['mean']:.3f} of the QK variance is captured and {ov['mean']:.3f} of the OV variance",
        f"move that by {abs(converted['OV']['mean'] - ov['mean']):.4f}",
        f"{qk['for_90_percent']:.0%} and {ov['for_90_percent']:.0%} of the components hold 90%",
    ]


def standard_error(*per_cents: float, questions: int) -> float:
    """Return that of a difference of two shares of right answers in points, the questions taken as independent."""
    return 100 * sum(share / 100 * (1 - share / 100) / questions for share in per_cents) ** 0.5


def paper_gain(task: str, questions: int, other: str) -> tuple[float, float]:
    """Return by how many points the paper's IHA is above another model, and its standard error."""
    paper = json.loads((ROOT / "evaluation" / "paper.json").read_text(encoding="utf-8"))
    (scores,) = (column["paper"] for column in paper["table_1"]["columns"] if column["name"] == f"{task} Maj@16")
    iha, base = (scores[paper["models"].index(model)] for model in ("IHA", other))
    return iha - base, standard_error(iha, base, questions=questions)


def paper_phrases() -> list[str]:
    paper = json.loads((ROOT / "evaluation" / "paper.json").read_text(encoding="utf-8"))["multi_key_retrieval"]
    low, high = paper["abstract"]["4096 to 16384"]
    first, second, third = paper["section_5_2"].values()
    gains = {
        name: [
            f"{gain:.1f} ± {1.96 * error:.1f}"
            for task, questions in (("GSM8K", 1319), ("MATH-500", 500))
            for gain, error in [paper_gain(task, questions, other)]
        ]
        for name, other in (("global attention", "global attention"), ("Diff Transformer", "diff"))
    }
    return [
        *(line(name, *of_model) for name, of_model in gains.items()),
        f"{low} to {high}% above global attention by the abstract, and {first}, {second} and {third}% at 4k, "
        "8k and 16k",
    ]


# Heading -> phrases, and the figures of the set-up and of the papers
STUDIES_README = {
    "Warm start": (warm_start_phrases, ()),
    "Variants of the warm start": (variants_phrases, ("0.005%",)),
    "Rate of the mixing": (rate_phrases, ("1.25", "3.2")),
    "Theorem 2: inclusion": (theorem_2_phrases, ("100%",)),
    "Theorem 3: polynomial filters": (theorem_3_phrases, ()),
    "Theorem 4: CPM-3": (theorem_4_phrases, ()),
    "Hyper attention": (hyper_phrases, ()),
    "Colliding agents": (agents_phrases, ()),
    "Relation composition": (relation_phrases, ("4.7", "3.3")),
    "Language models": (language_phrases, ("0.02",)),
    "Equal cache": (cache_phrases, ()),
    "Ladder": (ladder_phrases, ()),
    "DCMHA's synthetic tasks": (tasks_phrases, ("0.74",)),
    "DCMHA's ablation": (ablation_phrases, ("2.6%", "10%", "22%")),
    "The paper's own gains": (paper_phrases, ("1.96", "95%")),
    "Head diversity": (diversity_phrases, ("90%",)),
}


def section(document: str, heading: str) -> str:
    """Return the text of a section on one line, without targets of links."""
    content = (ROOT / document).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", content, re.DOTALL | re.MULTILINE)[1]
    return " ".join(re.sub(r"\]\([^)]*\)", "]", found).split())


def check(content: str, phrases: list[str], given: tuple[str, ...] = ()) -> None:
    """Find the phrases, and no figure but `given` besides."""
    for phrase in phrases:
        assert phrase in content, f"The table says: {phrase}"
    for phrase in phrases:
        content = content.replace(phrase, " ")
    left = re.findall(r"\d+\.\d+%?|\d+%", re.sub(r"Section \S+|Appendix \S+|Sections \S+ \S+", "", content))
    assert set(left) <= set(given), f"No study says: {sorted(set(left) - set(given))}"


@pytest.mark.parametrize("heading", STUDIES_README)
def test_figures_of_the_studies_are_those_of_their_tables(heading):
    phrases, given = STUDIES_README[heading]
    check(section("experiments/README.md", heading), phrases(), given)


# The other documents


def readme_phrases() -> list[str]:
    (gsm8k, gsm8k_error), (math, math_error) = (
        paper_gain(task, questions, "global attention") for task, questions in (("GSM8K", 1319), ("MATH-500", 500))
    )
    filters = {(row["kind"], row["heads"]): row for row in table("polynomial_filters")["learned"]}
    ours, theirs = filters["iha", 4], filters["mha", 5]
    seen = {kind: row["groups"]["all"]["seen"] for kind, row in rows("dcmha_tasks", "kind").items()}
    right = {kind: f"{value['mean']:.2f}" for kind, value in seen.items()}
    return [
        f"beats global attention by {gsm8k:.1f} points on GSM8K (54.2%, Maj@16) and {math:.1f} on MATH-500 (18.4%; "
        f"standard errors {gsm8k_error:.1f} and {math_error:.1f})",
        f"IHA's {ours['parameters']:,} parameters left {ours['error']['mean']:.4f} of the variance and MHA's "
        f"{theirs['parameters']:,} left {theirs['error']['mean']:.3f}",
        f'`"multi_token"` gave {right["multi_token"]} of the answers right, `"dcmha"` {right["dcmha"]}, `"iha"` '
        f'{text(seen["iha"], 2)} (undecided) and `"mha"` {right["mha"]}',
    ]


def test_the_readme_says_what_was_learned():
    check(section("README.md", "Does it learn more?"), readme_phrases(), ("2.4",))


def test_the_first_screen_has_quality_and_cost():
    start = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    start = " ".join(re.sub(r"\]\([^)]*\)", "]", start).split())
    iha = rows("language_models", "variant")
    differences = {
        budget: [iha["iha_4"][key][budget]["difference"] for key in ("minus_base", "minus_control")]
        for budget in ("steps", "FLOPs as the paper counts")
    }
    (ahead, beside), (more, behind) = differences.values()
    schedule = json.loads((ROOT / "benchmarks" / "results" / "schedule.json").read_text(encoding="utf-8"))
    model, attention = (
        [ratio for row in schedule["rows"] if row["part"].startswith(part) for ratio in row["ratios"].values()]
        for part in ("model", "attention")
    )
    assert len(model + attention) == 6
    two, four = (f"{iha[name]['minus_base']['time']['cost']:.2f}" for name in ("iha_2", "iha_4"))
    for phrase in (
        f"{text(ahead, 3, -1)} nats per byte ahead of ordinary attention, and {text(beside, 3, -1)} of ordinary",
        f"by the paper's count it is {text(more, 3, -1)} ahead and {text(behind)} behind",
        f"takes {span(model, '.2f')} times as long as ordinary attention in a model's [forward pass] on a CPU "
        f"({span(attention, '.2f')} in attention alone), and {two} (P = 2) and {four} (P = 4) in a small model's",
    ):
        assert phrase in start, phrase


def test_the_readme_says_what_its_conversion_costs():
    fields = json.loads((ROOT / "model_cards" / "smollm2-135m-iha-p2" / "record.json").read_text())["config"]
    config, tokens = IHAConfig(**fields), fields["max_position_embeddings"]
    kinds, layers = ["iha"] * 4 + ["mha"], ["sliding_attention"] * 4 + ["full_attention"]
    window = flop_matched_window(tokens, config.num_pseudo_heads)
    schedule = IHAConfig(**{**fields, "attention_kinds": kinds, "layer_types": layers, "sliding_window": window})
    source = cost_of_model(with_mha(config), tokens).prefill
    ratios = [f"{cost_of_model(each, tokens).prefill / source:.2f} times" for each in (config, schedule)]
    use = section("README.md", "Convert")
    assert f"a forward of {tokens:,} tokens is predicted at {ratios[0]} the source's FLOPs" in use
    assert f"`--schedule hybrid --window {window}`, is at {ratios[1]}, and exact up to {window:,} tokens" in use


def test_the_card_of_the_fine_tuned_model_has_its_run():
    (run,) = (run for run in table("warm_start")["runs"] if (run["variant"], run["seed"]) == ("iha_2", 1))
    (twin,) = (run for run in table("warm_start")["runs"] if (run["variant"], run["seed"]) == ("mha", 1))
    card = (ROOT / "model_cards" / "smollm2-135m-iha-p2-sft" / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (\S+(?: rows)?) \| \w+ \| (.+?) \| (.+?) \|", card, re.MULTILINE)
    shown = {name: figures for name, *figures in cells}
    mha, iha = (row["loss"]["values"] for row in table("warm_start")["rows"])
    lower = differences(mha, iha)
    assert max(lower["values"]) == pytest.approx(twin["eval"][-1][1] - run["eval"][-1][1])
    assert f"lower than the twins' by {text(lower, 4)} (95% interval): undecided" in card
    assert shown["held-out rows"] == [f"{each['eval'][-1][1]:.3f}" for each in (run, twin)]
    for task in warm_start.TASKS:
        shares = [100 * each["correct"][task] / warm_start.TEST_ROWS for each in (run, twin)]
        assert [float(figure.split(" ±")[0]) for figure in shown[task]] == pytest.approx(shares)


# The tables


def test_rows_are_those_of_the_runs_that_the_tables_keep():
    assert table("warm_start")["rows"] == warm_start.summaries(table("warm_start")["runs"])
    runs = {(run["variant"], run["seed"]): run for run in table("warm_start_variants")["runs"]}
    for name, row in rows("warm_start_variants", "variant").items():
        for key, value in warm_start_variants.summary(name, runs).items():
            assert {**row[key], **value} == row[key] if key.startswith("minus") else row[key] == value
    found = table("relation_composition")
    kinds = list(dict.fromkeys(row["kind"] for row in found["rows"]))
    summaries = [
        row
        for task in found["tasks"]
        for rate in found["rates"]
        for row in relation_composition.summary(task, rate, kinds, found["runs"])
    ]
    assert [row["accuracy"] for row in found["rows"]] == [row["accuracy"] for row in summaries]
    for study, variants in (
        *((f"language_models{length}", language_models.VARIANTS) for length in ("", "_512")),
        ("equal_cache", equal_cache.VARIANTS),
    ):
        for row, again in zip(table(study)["rows"], language_models.summaries_of(table(study), variants), strict=True):
            assert {**row, **again} == row


# Their tables were written before the values of single seeds were kept.
OLDER = {"cpm3", "hyper_attention"}


def spreads(value) -> list[dict]:
    """Return every `interval` and `spread` in a table."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [value] if isinstance(value, dict) and ("half_width" in value or "min" in value) else []
    return own + [each for part in parts for each in spreads(part)]


@pytest.mark.parametrize("study", sorted(set(STUDIES) - OLDER))
def test_a_table_names_its_command_and_has_the_value_of_every_seed(study):
    assert table(study)["command"] == "not recorded" or study_of(study) in table(study)["command"]
    for each in spreads(table(study)):
        again = interval(each["values"]) if "half_width" in each else {"mean": fmean(each["values"])}
        assert each["mean"] == pytest.approx(again["mean"])
        assert each.get("half_width") == pytest.approx(again.get("half_width"))


@pytest.mark.parametrize("name", TABLES)
def test_a_plot_is_drawn_from_its_table(name):
    """Draw it 800 pixels wide, with its message, and no two lines that look alike."""
    figure = import_module(study_of(name)).plot(read_json(TABLES[name]))
    assert figure.get_suptitle() and figure.get_size_inches()[0] * plots.DOTS_PER_INCH == 800
    for axes in figure.axes:
        named = [(line.get_color(), line.get_linestyle()) for line in axes.lines if line.get_label()[0] != "_"]
        assert len(named) == len(set(named)), "two lines look alike"

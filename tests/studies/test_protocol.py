"""Test the protocol of comparisons, and the studies that keep to it: language models, paired heads, recall."""

import argparse
import json
import math
import re
from pathlib import Path
from statistics import mean

import pytest
import torch

from iha import plots
from iha.errors import ROOT, UserError
from iha.model_cost import model as cost_of
from modeling_iha import IHAForCausalLM
from research import compare
from research.experiments import hyper_language, language_models, paired_heads, protocol, recall
from research.experiments.language_models import VARIANTS, config_of, size_of


TINY = language_models.sized(width=16, ffn=48, layers=5, heads=4, tokens_per_step=64, tokens=32, steps=4)
MHA, IHA, DCMHA = (language_models.build(TINY, attention_kinds=kind) for kind in ("mha", "iha", "dcmha"))
TEXT = (torch.arange(2000) * 7 % 50).to(torch.uint8)


# The protocol


@pytest.mark.parametrize(
    ("best", "expected"), [(1.0, [1, 2, 0.5]), (4.0, [1, 2, 0.5, 4, 8]), (0.25, [1, 2, 0.5, 0.25, 0.125])]
)
def test_a_rate_is_followed_as_long_as_the_loss_falls(best, expected):
    tried = []

    def loss_at(rate: float) -> float:
        tried.append(rate)
        return abs(math.log(rate / best))

    assert protocol.walk(loss_at, 1.0, 2.0) == best and tried == expected


def test_a_neighbor_that_wins_by_chance_does_not_hide_the_other():
    """Take a plateau from 1 upwards, where the losses differ by noise, and a model that learns below."""
    losses = {4.0: 0.721, 2.0: 0.7217, 1.0: 0.724, 0.5: 0.3, 0.25: 0.4}
    assert protocol.walk(losses.__getitem__, 1.0, 2.0) == 0.5


def test_the_mixing_is_tuned_beside_the_best_rate_and_a_diverged_run_is_never_the_best():
    def end_of(rate: float, mixing: float) -> float:
        return math.nan if rate > protocol.FIRST_RATE else abs(math.log(mixing / 4))

    assert protocol.tune(lambda rate, mixing: math.nan if rate > 2e-3 else 1.0, mixes=False).rate == 2e-3
    rates = protocol.tune(end_of, mixes=True)
    assert (rates.rate, rates.mixing) == (protocol.FIRST_RATE, 4.0)
    assert [tried[:2] for tried in rates.tried[:3]] == [[4e-3, 1.0], [8e-3, 1.0], [2e-3, 1.0]]
    assert protocol.tune(end_of, mixes=False).mixing == 1.0


def compared(output: Path, most_seeds: int, spread: float) -> tuple[dict, dict, list]:
    """Run the protocol with losses whose differences from the base scatter by `spread` over seeds."""
    args = argparse.Namespace(output=output, kinds=["base", "other"], most_seeds=most_seeds, effect=0.1)
    ran = []

    def run(name: str, seed: int, rate: float, mixing: float) -> dict:
        ran.append((name, seed, rate, mixing))
        loss = 1.0 if name == "base" else 1.5 + spread * (-1) ** seed
        return {"curve": [[0, 2.0], [10, loss + abs(rate - protocol.FIRST_RATE)]], "seconds": 1.0}

    return *protocol.compare_tuned(args, {}, run, {"base": MHA, "other": IHA}.__getitem__), ran


def test_seeds_are_added_until_the_intervals_are_narrow(tmp_path, monkeypatch):
    rates, runs, ran = compared(tmp_path / "narrow", 9, 0.01)
    assert {len(of_variant) for of_variant in runs.values()} == {6}
    tuning = [seed for _, seed, _, _ in ran if seed == protocol.TUNING_SEED]
    assert len(tuning) == 8  # three rates each, and two multiples of the mixing for one
    assert [key[:2] for key in ran[8:]] == [(name, seed) for seed in range(6) for name in ("base", "other")]
    with pytest.raises(UserError, match="--most-seeds 2: expected at least 3"):
        compared(tmp_path, 2, 0.01)
    fixed = compared(tmp_path / "fixed", 3, 0.01)[1]
    assert {len(of_variant) for of_variant in fixed.values()} == {3}
    for fewest, most in ((6, 9), (2, 3)):
        monkeypatch.setattr(protocol, "FEWEST_SEEDS", fewest)
        runs = compared(tmp_path / f"wide-{most}", most, 1.0)[1]
        assert {len(of_variant) for of_variant in runs.values()} == {most}


def protocol_of(output: Path, loss_of, report=lambda *_: None, **options) -> tuple[dict, dict, list]:
    """Run the protocol on one variant whose loss at the end is a function of its rate, from an untrained loss of 2."""
    args = argparse.Namespace(output=output, kinds=["base"], most_seeds=3, effect=0.1, **options)
    ran = []

    def run(name: str, seed: int, rate: float, mixing: float) -> dict:
        ran.append((seed, rate))
        return {"curve": [[0, 2.0], [10, loss_of(rate)]], "seconds": 1.0}

    return *protocol.compare_tuned(args, {}, run, {"base": MHA}.__getitem__, report=report), ran


def test_a_rate_that_learns_nothing_ends_the_search(tmp_path):
    """Let the loss fall for ever with the rate, and stay above that of the untrained model."""
    rates, _, ran = protocol_of(tmp_path, lambda rate: 2.0 + 1e-3 / rate)
    assert rates["base"].rate == protocol.FIRST_RATE and len(ran) == 3 + 3


def test_an_untuned_protocol_takes_the_first_rate(tmp_path):
    rates, _, ran = protocol_of(tmp_path, lambda rate: 1.0, untuned=True)
    assert rates["base"] == (protocol.FIRST_RATE, 1.0, [])
    assert ran == [(seed, protocol.FIRST_RATE) for seed in range(3)]


def test_each_run_is_reported(tmp_path, capsys):
    """Print and plot what there is after each run: the best one of the tuning, and then those of the seeds."""
    printed = []

    def report(tuning: dict, runs: dict) -> None:
        compare.so_far(tmp_path, tuning, runs)
        printed.append(capsys.readouterr().out.splitlines()[-2].split())
        (tmp_path / "so_far.png").unlink()

    protocol_of(tmp_path, lambda rate: math.log(2) * (1 + abs(rate - protocol.FIRST_RATE)), report)
    tuned, seeds = printed[:3], printed[3:]
    assert tuned == [["base", "1.0000", "of", "the", "tuning"]] * 3
    assert seeds == [["base", "1.0000", str(number), "seeds"] for number in (1, 2, 3)]


def test_budgets_are_read_where_the_dearer_side_has_spent_what_the_cheaper_one_has():
    def runs(*values: float, seconds: float) -> list[dict]:
        return [{"curve": [[0, 10.0 + value], [10, value]], "seconds": seconds} for value in values]

    sides = {"base": runs(1.0, 2.0, seconds=2.0), "dear": runs(0.5, 1.5, seconds=8.0)}
    found = protocol.budgets(sides, "dear", "base", (2.0, 1.0))
    assert [found[budget]["cost"] for budget in protocol.BUDGETS] == [1.0, 2.0, 1.0, 4.0]
    assert [each["difference"]["mean"] for each in found.values()] == [-0.5, 4.5, -0.5, 7.0]
    cheap = protocol.budgets(sides, "base", "dear", (0.5, 1.0))
    assert [each["difference"]["mean"] for each in cheap.values()] == [0.5, -4.5, 0.5, -7.0]


def test_a_loss_between_evaluations_lies_on_a_curve():
    """Losses fall ever slower, so a line between two evaluations is above them."""
    curve = [[step, math.exp(-step / 60)] for step in range(0, 401, 40)]
    for step in (60, 100, 140, 380):
        assert protocol.loss_at(curve, step) == pytest.approx(math.exp(-step / 60), rel=0.02)
    assert protocol.loss_at(curve, 80) == curve[2][1]
    assert math.isnan(protocol.loss_at([*curve[:-1], [400, math.inf]], 60))


# Language models


@pytest.mark.parametrize("tokens", [256, 512])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_equal_parameters_and_the_schedules_about_equal_flops(variant, tokens):
    """Allow half a channel of the FFN, and count as PyTorch does."""
    size = size_of(language_models.SMALL, tokens)
    config, base = config_of(size, **VARIANTS[variant]), config_of(size)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in IHAForCausalLM(config).parameters())
    assert count == cost_of(config, tokens).parameters
    assert abs(count - cost_of(base, tokens).parameters) <= 3 * 64 * 5 / 2
    if variant in ("iha_2", "iha_4"):
        pseudo_heads = config.num_pseudo_heads
        assert config.sliding_window == tokens // (2 * pseudo_heads**2)
        assert list(config.attention_kinds) == ["iha"] * 4 + ["mha"]
        assert config.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
        costs = [cost_of(each, tokens, "sdpa").training for each in (config, base)]
        assert costs[0] / costs[1] == pytest.approx(1, abs=0.03)


def test_language_models_compare_and_go_on_where_they_stopped(run_protocol, tmp_path):
    table, _ = run_protocol(language_models, {"SMALL": TINY}, ["mha", "iha_2"], "--tokens", "32")
    assert (tmp_path / "language_models_32.json").exists()
    base, row = table["rows"]
    ends = {name: [curve[-1][1] for curve in curves] for name, curves in table["runs"].items()}
    assert base["loss"]["values"] == ends["mha"] and row["loss"]["values"] == ends["iha_2"]
    found = row["minus_base"]["steps"]["difference"]
    assert found["mean"] == pytest.approx(mean(ends["iha_2"]) - mean(ends["mha"])) and "p_holm" in found
    assert row["minus_base"]["FLOPs"]["cost"] > 1 and "minus_base" not in base


def one_run(size: dict, text: torch.Tensor, variant: str = "mha", seed: int = 0) -> dict:
    return language_models.one_run(size, VARIANTS, text, variant, seed, 1e-2, 1.0)


def test_variants_of_a_seed_start_from_common_weights_and_read_the_same_rows(monkeypatch):
    train, losses_of = language_models.train, language_models.losses_of
    started, read = [], []

    def watch_start(name, model, *others):
        started.append({name: value.detach().clone() for name, value in model.named_parameters()})
        read.append([])
        return train(name, model, *others)

    def watch_rows(model, rows):
        read[-1].append(rows)
        return losses_of(model, rows)

    monkeypatch.setattr(language_models, "train", watch_start)
    monkeypatch.setattr(language_models, "losses_of", watch_rows)
    for variant, seed in (("mha", 0), ("iha_2", 0), ("mha", 1)):
        one_run(size_of(TINY, 32), TEXT, variant, seed)
    mha, iha, of_other_seed = started
    assert mha.keys() < iha.keys()
    for name, value in mha.items():
        common = tuple(slice(min(sizes)) for sizes in zip(value.shape, iha[name].shape))
        assert iha[name][common].equal(value[common]), name
    assert torch.cat(read[0]).equal(torch.cat(read[1])) and not torch.cat(read[0]).equal(torch.cat(read[2]))
    assert not mha["model.embed_tokens.weight"].equal(of_other_seed["model.embed_tokens.weight"])


def test_the_held_out_text_is_never_trained_on(monkeypatch):
    """Make the bytes of the last tenth ones, all others zeros."""
    text = torch.zeros(1000, dtype=torch.uint8)
    text[900:] = 1
    seen = {True: set(), False: set()}
    losses_of = language_models.losses_of

    def watch(model, rows):
        seen[torch.is_grad_enabled()].update(rows.unique().tolist())
        return losses_of(model, rows)

    monkeypatch.setattr(language_models, "losses_of", watch)
    one_run({**size_of(TINY, 32), "batch": 200}, text)
    assert seen == {True: {0}, False: {1}}


def test_three_layers_of_hyper_feature_attention_learn_in_small(run_protocol):
    size = language_models.sized(width=24, ffn=48, layers=3, heads=2, tokens_per_step=256, steps=4)
    kinds = ["mha", "hyper_feature_3"]
    table, runs = run_protocol(hyper_language, {"SIZE": size}, kinds, changed={"SIZE": {**size, "steps": 5}})
    base, row = table["rows"]
    assert row["parameters"] == base["parameters"] and row["minus_base"]["steps"]["cost"] == 1
    config = config_of(size_of(size, 256), **hyper_language.VARIANTS["hyper_feature_3"])
    assert config.options_of("hyper_feature").orders == 3
    assert runs.keys() == set(kinds)


# Paired heads


@pytest.mark.parametrize(
    "variant", [name for name in paired_heads.VARIANTS if name.startswith(("wide", "paired")) and "+" not in name]
)
def test_paired_heads_and_their_controls_attend_to_as_many_pairs_as_windows_alone(variant):
    """Allow the twice as long windows, and paired heads in the global layer."""
    size = size_of(paired_heads.SIZES[128], 512)
    config, base = (config_of(size, **paired_heads.VARIANTS[name]) for name in (variant, "global_local"))
    assert config.intermediate_size == base.intermediate_size  # no parameter more
    costs = [cost_of(each, 512).training for each in (config, base)]
    assert costs[0] / costs[1] == pytest.approx(1, abs=0.04)


def test_wide_windows_have_the_positions_of_interleaved_tokens_in_their_windows_alone():
    size = size_of(TINY, 64)
    model = paired_heads.model_of(size, "wide_4_16", 0)
    seen = []
    for layer in model.model.layers:
        attention = layer.self_attn
        rotate = attention.rotate
        attention.rotate = lambda query, key, cos, sin, rotate=rotate: seen.append(cos) or rotate(query, key, cos, sin)
    model(torch.zeros(1, 6, dtype=torch.long))
    frequencies = model.model.rotary_emb.inv_freq
    for place, cos in enumerate(seen):
        positions = torch.arange(6) * (1 if place == 4 else 4)
        assert torch.allclose(cos[0, :, : len(frequencies)], (positions[:, None] * frequencies).cos(), atol=1e-6)


def test_paired_heads_compare_with_windows_alone_at_equal_time(run_protocol, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paired_heads, "TIMED_STEPS", 1)
    monkeypatch.setattr(paired_heads, "TIMED_ROUNDS", 1)
    monkeypatch.setattr(paired_heads, "read_text", lambda *given: TEXT)
    names, sizes = ["global_local", "paired_4"], {64: {**TINY, "tokens_per_step": 128}}
    changed = {"SIZES": {64: {**sizes[64], "heads": 1}}}
    table, runs = run_protocol(paired_heads, {"SIZES": sizes}, names, "--tokens", "128", changed=changed)
    base, row = table["rows"]
    assert row["minus_base"]["time"]["cost"] == pytest.approx(
        table["step_seconds"]["paired_4"] / table["step_seconds"]["global_local"]
    )
    assert row["parameters"] == base["parameters"] and runs.keys() == set(names)

    # The same table as the command for one's own text prints it. A step reads whole rows, of 128 tokens here.
    arm_of = {"global_local": "windows", "paired_4": "paired"}
    for each in table["rows"]:
        each["variant"] = arm_of[each["variant"]]
    for key in ("step_seconds", "runs"):
        table[key] = {arm_of[name]: value for name, value in table[key].items()}
    (tmp_path / "table.json").write_text(json.dumps(table | {"tokens_per_step": 200}))
    asked = []
    monkeypatch.setattr(paired_heads, "run", lambda args, report: asked.append(args) or tmp_path / "table.json")
    words = ["--arms", "paired", "windows", "--text", "my.txt", "--seeds", "4", "--tokens", "128"]
    compare.main([*words, "--steps", "50"])
    (given,) = asked
    assert given.kinds == ["windows", "paired"] and given.output == ROOT / "outputs/compare/my-tiny-128-50/runs"
    assert Path(given.text).name == "my.txt" and (given.most_seeds, given.steps, given.untuned) == (4, 50, False)
    command = "research.compare --arms paired windows --text my.txt --seeds 4 --tokens 128 --steps 50"
    assert given.command == command
    _, windows, paired, *_ = capsys.readouterr().out.splitlines()
    assert windows.split()[0] == "windows" and f"{base['loss']['mean'] / math.log(2):.4f}" in windows
    differences = [row["minus_base"][budget]["difference"] for budget in ("steps", "FLOPs", "time")]
    shown = [f"{each['mean']:+.4f} ± {each['half_width']:.4f}" for each in differences]
    assert re.split(" {2,}", paired)[3:7] == [*shown, f"{128 / table['step_seconds']['paired']:,.0f}"]
    compare.main([*words, "--steps", "10"])
    assert "Note: --steps 10 ends before the warm-up of 40 steps: no rate is" in capsys.readouterr().out
    assert asked[-1].untuned
    with pytest.raises(UserError, match="--tokens 64: the arm 'paired' cannot be built; give longer rows"):
        compare.main([*words[:-1], "64"])

    # The axis of the losses is cut above where they all fall alike, if any of them ends below.
    for lowest, is_cut in ((1.0, True), (3.0, False)):
        base["loss"]["mean"] = row["loss"]["mean"] = lowest
        figure = paired_heads.plot(table)
        by_time, differences = figure.axes
        bottom, top = by_time.get_ylim()
        assert bottom == pytest.approx(lowest - 0.05) and top > bottom and (top == paired_heads.HIGHEST_LOSS) == is_cut

    # The plot names the arms as the table does, and no legend covers the curves.
    plots.save_plot(figure, tmp_path / "plot.png")
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["windows", "paired"]
    assert [text.get_text() for text in differences.get_yticklabels()] == ["paired - windows"]
    assert by_time.get_legend() is None and legend.get_window_extent().y1 <= by_time.get_tightbbox().y0


def test_paired_heads_learn_a_file_of_ones_own(tmp_path):
    file = tmp_path / "my.txt"
    file.write_bytes(bytes(range(256)) * 20)
    assert bytes(paired_heads.read_text(str(file), 254).tolist()) == file.read_bytes()
    with pytest.raises(UserError, match=r"my.txt has 5,120 bytes: expected at least 5,140"):
        paired_heads.read_text(str(file), 256)
    for argument, message in (
        ("absent.txt", "absent.txt: No such file or directory; expected a file"),
        (str(file), "has 5,120 bytes"),
    ):
        with pytest.raises(UserError, match=message):
            paired_heads.main(["--text", argument, "--output", str(tmp_path), "--results", str(tmp_path)])


def test_steps_are_timed_on_the_shortest_text(tmp_path, monkeypatch):
    """A text that is long enough for two held-out rows may have fewer rows than a batch."""
    monkeypatch.setattr(paired_heads, "TIMED_STEPS", 1)
    monkeypatch.setattr(paired_heads, "TIMED_ROUNDS", 1)
    (tmp_path / "short.txt").write_bytes(bytes(range(33)) * 20)
    text = paired_heads.read_text(str(tmp_path / "short.txt"), 32)
    size = size_of({**TINY, "tokens_per_step": 1024}, 32)
    assert size["batch"] * 32 > len(text)
    assert paired_heads.step_seconds(size, text, ["mha"])["mha"] > 0


# Recall


def test_keys_that_were_listed_are_asked_and_their_answers_are_the_labels():
    for pairs in (2, 3, 4):
        rows, labels = recall.draw(3, pairs, 4, torch.Generator().manual_seed(0))
        assert rows.shape == labels.shape == (3, recall.tokens_of(4))
        for row, answers in zip(rows.unflatten(1, (-1, 2)).tolist(), labels.unflatten(1, (-1, 2)).tolist()):
            values = dict(row[:pairs])
            assert len(values) == pairs and answers[:pairs] == [[-100, -100]] * pairs
            for (key, filler), answer in zip(row[pairs:], answers[pairs:], strict=True):
                assert filler == recall.FILLER and answer == [values[key], -100]


@pytest.mark.parametrize("name", recall.VARIANTS)
def test_the_first_layer_of_a_recalling_model_sees_a_key_and_its_value(name):
    config = recall.config_of(4, **recall.VARIANTS[name])
    window = "full_attention" if name == "mha_global" else "sliding_attention"
    assert config.layer_types == [window, "full_attention"]
    assert config.sliding_window == (None if name == "mha_global" else 2)
    kind = name.removesuffix("_global").removesuffix("_window").removesuffix("_shared").replace("wide", "mha")
    assert config.attention_kinds == ([kind, "mha"] if name.endswith("_window") else ["mha", kind])


def test_recall_averages_the_share_of_wrong_answers_over_a_run(monkeypatch):
    _, labels = recall.draw(recall.HELD_OUT_ROWS, 4, 4, torch.Generator().manual_seed(3001))
    wrong, right = torch.zeros_like(labels), labels.clamp_min(0)

    def answers(tokens: torch.Tensor):
        logits = torch.nn.functional.one_hot(tokens, 256).float()
        return lambda rows, use_cache: argparse.Namespace(logits=logits)

    def fit(model, loss, evaluate, *others):
        return [[0, *evaluate(answers(wrong), 0)], [1, *evaluate(answers(right), 1)]], 1.0

    monkeypatch.setattr(recall, "fit", fit)
    assert recall.one_run(4, "mha", 0, 1e-3, 1.0)["curve"] == [[0, 1.0, 1.0], [1, 0.5, 0.0]]


def test_recall_goes_on_where_it_stopped(run_protocol):
    small = recall.sized(width=16, ffn=48, layers=2, heads=2, rows_per_step=2, steps=4)
    sizes = {"SMALL": small, "EVALUATIONS": 2, "HELD_OUT_ROWS": 4, "FIRST_RATE": 4.096}
    table, runs = run_protocol(recall, sizes, ["mha", "paired_heads"], changed={"EVALUATIONS": 1})
    for row in table["rows"]:
        assert row["wrong"]["values"] == [run["curve"][-1][1] for run in runs[row["variant"]]]

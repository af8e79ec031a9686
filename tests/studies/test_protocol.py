"""Test the protocol of comparisons, and `research.compare`."""

import io
import json
import math
import re
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch

from iha import plots
from iha.errors import ROOT, UserError
from iha.model_cost import parameters_of, passes_of_model
from modeling_iha import IHAForCausalLM
from research import compare
from research.experiments import byte_models, protocol
from research.experiments.arms import ARMS, BARE_ARMS, SIZES, Arm, Size, build, config_of
from research.experiments.protocol import Plan


TINY = Size(16, 48, 5, 4, tokens_per_step=128, steps=12, first_rate=4.096, held_out_rows=4, tokens=128)
MHA, IHA = (build(TINY, Arm(kind, 4)) for kind in ("mha", "iha"))
TEXT = (torch.arange(4000) * 7 % 50).to(torch.uint8)


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

    first = protocol.FIRST_RATE
    assert protocol.tune(lambda rate, mixing: math.nan if rate > 2e-3 else 1.0, False, first).rate == 2e-3
    rates = protocol.tune(end_of, True, first)
    assert (rates.rate, rates.mixing) == (protocol.FIRST_RATE, 4.0)
    assert [tried[:2] for tried in rates.tried[:3]] == [[4e-3, 1.0], [8e-3, 1.0], [2e-3, 1.0]]
    assert protocol.tune(end_of, False, first).mixing == 1.0


def compared(output: Path, most_seeds: int, spread: float) -> tuple[dict, dict, list]:
    """Run the protocol with losses whose differences from the base scatter by `spread` over seeds."""
    plan = Plan(["base", "other"], most_seeds, effect=0.1)
    ran = []

    def run(name: str, seed: int, rate: float, mixing: float) -> dict:
        ran.append((name, seed, rate, mixing))
        loss = 1.0 if name == "base" else 1.5 + spread * (-1) ** seed
        return {"curve": [[0, 2.0], [10, loss + abs(rate - protocol.FIRST_RATE)]], "seconds": 1.0}

    return *protocol.compare_tuned(plan, output, {}, run, {"base": MHA, "other": IHA}.__getitem__), ran


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


def protocol_of(output: Path, loss_of, report=lambda *_: None, tuned: bool = True) -> tuple[dict, dict, list]:
    """Run the protocol on one variant whose loss at the end is a function of its rate, from an untrained loss of 2."""
    plan = Plan(["base"], 3, effect=0.1, tuned=tuned)
    ran = []

    def run(name: str, seed: int, rate: float, mixing: float) -> dict:
        ran.append((seed, rate))
        return {"curve": [[0, 2.0], [10, loss_of(rate)]], "seconds": 1.0}

    return *protocol.compare_tuned(plan, output, {}, run, {"base": MHA}.__getitem__, report), ran


def test_a_rate_that_learns_nothing_ends_the_search(tmp_path):
    """Let the loss fall for ever with the rate, and stay above that of the untrained model."""
    rates, _, ran = protocol_of(tmp_path, lambda rate: 2.0 + 1e-3 / rate)
    assert rates["base"].rate == protocol.FIRST_RATE and len(ran) == 3 + 3


def test_an_untuned_protocol_takes_the_first_rate(tmp_path):
    rates, _, ran = protocol_of(tmp_path, lambda rate: 1.0, tuned=False)
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
    found = protocol.budgets(sides, "dear", "base", 2.0)
    assert [found[budget]["cost"] for budget in protocol.BUDGETS] == [1.0, 2.0, 4.0]
    assert [each["difference"]["mean"] for each in found.values()] == [-0.5, 4.5, 7.0]
    cheap = protocol.budgets(sides, "base", "dear", 0.5)
    assert [each["difference"]["mean"] for each in cheap.values()] == [0.5, -4.5, -7.0]


def test_a_loss_between_evaluations_lies_on_a_curve():
    """Losses fall ever slower, so a line between two evaluations is above them."""
    curve = [[step, math.exp(-step / 60)] for step in range(0, 401, 40)]
    for step in (60, 100, 140, 380):
        assert protocol.loss_at(curve, step) == pytest.approx(math.exp(-step / 60), rel=0.02)
    assert protocol.loss_at(curve, 80) == curve[2][1]
    assert math.isnan(protocol.loss_at([*curve[:-1], [400, math.inf]], 60))


# The arms


@pytest.mark.one_of(2)
@pytest.mark.parametrize("tokens", [256, 512])
@pytest.mark.parametrize("name", ARMS)
def test_arms_have_equal_parameters(name, tokens):
    """Allow half a channel of the FFN, and count as PyTorch does."""
    size = SIZES["tiny"].with_rows(tokens)
    config, base = config_of(size, ARMS[name]), config_of(size, ARMS["mha"])
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in IHAForCausalLM(config).parameters())
    assert abs(count - parameters_of(base)) <= 3 * 64 * 5 / 2


def test_arms_attend_to_as_many_pairs_as_their_base():
    """Compare paired heads and short windows with windows, and the paper's schedule with ordinary attention."""
    size = SIZES["small"].with_rows(512)
    steps = {name: passes_of_model(config_of(size, arm), 512).training for name, arm in BARE_ARMS.items()}
    assert steps["paired"] == pytest.approx(steps["windows"], rel=0.04)
    assert steps["short_windows"] == pytest.approx(steps["windows"], rel=0.04)
    assert steps["iha"] == pytest.approx(steps["mha"], rel=0.06)
    config = config_of(size, ARMS["iha"])
    assert config.sliding_window == 512 // (2 * config.num_pseudo_heads**2)
    assert list(config.attention_kinds) == ["iha"] * 4 + ["mha"]
    assert config.layer_types == ["sliding_attention"] * 4 + ["full_attention"]


def test_short_windows_have_wide_positions_in_their_windows_alone():
    model = IHAForCausalLM(config_of(TINY, ARMS["short_windows"]))
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


# Models of bytes


def one_run(size: Size, text: torch.Tensor, arm: str = "mha", seed: int = 0) -> dict:
    return byte_models.train(size, text, arm, ARMS[arm], seed, 1e-2, 1.0)


def test_arms_of_a_seed_start_from_common_weights_and_read_the_same_rows(monkeypatch):
    model_on, losses_of = byte_models.model_on, byte_models.losses_of
    started, read = [], []

    def watch_start(*arguments):
        model = model_on(*arguments)
        started.append({name: value.detach().clone() for name, value in model.named_parameters()})
        read.append([])
        return model

    def watch_rows(model, rows):
        read[-1].append(rows)
        return losses_of(model, rows)

    monkeypatch.setattr(byte_models, "model_on", watch_start)
    monkeypatch.setattr(byte_models, "losses_of", watch_rows)
    for arm, seed in (("mha", 0), ("iha", 0), ("mha", 1)):
        one_run(TINY, TEXT, arm, seed)
    mha, iha, of_other_seed = started
    assert mha.keys() < iha.keys()
    for name, value in mha.items():
        common = tuple(slice(min(sizes)) for sizes in zip(value.shape, iha[name].shape))
        assert iha[name][common].equal(value[common]), name
    assert torch.cat(read[0]).equal(torch.cat(read[1])) and not torch.cat(read[0]).equal(torch.cat(read[2]))
    assert not mha["model.embed_tokens.weight"].equal(of_other_seed["model.embed_tokens.weight"])


def test_the_held_out_text_is_never_trained_on(monkeypatch):
    """Make the bytes of the last tenth ones, all others zeros."""
    text = torch.zeros(2000, dtype=torch.uint8)
    text[1800:] = 1
    seen = {True: set(), False: set()}
    losses_of = byte_models.losses_of

    def watch(model, rows):
        seen[torch.is_grad_enabled()].update(rows.unique().tolist())
        return losses_of(model, rows)

    monkeypatch.setattr(byte_models, "losses_of", watch)
    one_run(replace(TINY, tokens_per_step=128 * 100, steps=2), text)
    assert seen == {True: {0}, False: {1}}


def test_a_file_of_ones_own_is_read(tmp_path):
    file = tmp_path / "my.txt"
    file.write_bytes(bytes(range(256)) * 20)
    assert bytes(byte_models.read_text(str(file), 254).tolist()) == file.read_bytes()
    with pytest.raises(UserError, match=r"my.txt has 5,120 bytes: expected at least 5,140"):
        byte_models.read_text(str(file), 256)
    with pytest.raises(UserError, match="absent.txt: No such file or directory; expected a file"):
        compare.main(["--text", str(tmp_path / "absent.txt"), "--output", str(tmp_path / "out")])


def test_steps_are_timed_on_the_shortest_text(tmp_path, monkeypatch):
    """A text that is long enough for two held-out rows may have fewer rows than a batch."""
    monkeypatch.setattr(byte_models, "TIMED_STEPS", 1)
    monkeypatch.setattr(byte_models, "TIMED_ROUNDS", 1)
    (tmp_path / "short.txt").write_bytes(bytes(range(33)) * 20)
    text = byte_models.read_text(str(tmp_path / "short.txt"), 32)
    size = replace(TINY, tokens_per_step=1024, tokens=32)
    assert size.batch * 32 > len(text)
    assert byte_models.step_seconds(size, text, {"mha": ARMS["mha"]})["mha"] > 0


# The command


@pytest.fixture(scope="module")
def tiny_compare(tmp_path_factory):
    """Return a function that compares two arms in small, and returns the table and what was printed."""
    place = tmp_path_factory.mktemp("compare")
    (place / "my.txt").write_bytes(bytes(TEXT.tolist()))
    given = ["--arms", "paired", "windows", "--text", str(place / "my.txt"), "--tokens", "128"]

    def run(*words: str) -> tuple[dict, str]:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
            patch.setattr(byte_models, "TIMED_STEPS", 1)
            patch.setattr(byte_models, "TIMED_ROUNDS", 1)
            patch.setattr(byte_models, "EVALUATIONS", 4)
            patch.setitem(SIZES, "tiny", TINY)
            compare.main([*given, "--output", str(place / "out"), *words])
        assert not (place / "out" / "so_far.png").exists()
        return json.loads((place / "out" / "compare.json").read_text()), printed.getvalue()

    return run


@pytest.fixture(scope="module")
def comparison(tiny_compare):
    return tiny_compare()


def test_a_comparison_prints_its_table_and_goes_on_where_it_stopped(comparison, tiny_compare):
    record, out = comparison
    windows, paired = record["rows"]
    assert (windows["arm"], paired["arm"]) == ("windows", "paired") and "minus_first" not in windows
    ends = {arm: [curve[-1][1] for curve in curves] for arm, curves in record["runs"].items()}
    assert windows["loss"]["values"] == ends["windows"] and len(ends["windows"]) == 3
    compared = paired["minus_first"]
    assert compared["steps"]["difference"]["mean"] == pytest.approx(mean(ends["paired"]) - mean(ends["windows"]))
    assert "p_holm" in compared["time"]["difference"]
    costs = record["step_seconds"]
    assert compared["time"]["cost"] == pytest.approx(costs["paired"] / costs["windows"])
    assert compared["FLOPs"]["cost"] > 0

    _, shown, of_paired, *_ = out[out.index("arm   ") :].splitlines()
    assert shown.split()[0] == "windows" and f"{windows['loss']['mean'] / math.log(2):.4f}" in shown
    differences = [compared[budget]["difference"] for budget in ("steps", "FLOPs", "time")]
    cells = [f"{each['mean']:+.4f} ± {each['half_width']:.4f}" for each in differences]
    assert re.split(" {2,}", of_paired)[3:7] == [*cells, f"{128 / costs['paired']:,.0f}"]
    assert "No rate was tuned in this short comparison" in out  # it ends before the warm-up

    _, again = tiny_compare("--seeds", "4")
    assert again.count(" done\n") == 2  # a fourth seed of both; the times are kept


def test_the_words_of_a_comparison_become_one_object(capsys):
    words = ["--arms", "paired", "windows", "--text", "my.txt", "--seeds", "4", "--tokens", "128"]
    given = compare.read_arguments([*words, "--steps", "50"])
    assert given.plan == Plan(["windows", "paired"], 4, 0.01, 4e-3, tuned=True)
    assert given.study.runs == ROOT / "outputs/compare/my-tiny-128-50/runs" and Path(given.text).name == "my.txt"
    assert given.study.command == "research.compare " + " ".join([*words, "--steps", "50"])
    assert (given.size.steps, given.size.tokens, given.size.batch) == (50, 128, 16)
    assert not compare.read_arguments([*words, "--steps", "10"]).plan.tuned
    assert "Note: --steps 10 ends before the warm-up of 40 steps: no rate is" in capsys.readouterr().out
    assert not compare.read_arguments([*words[:-2], "--size", "seconds"]).plan.tuned
    for wrong, message in (
        (["--tokens", "64"], "--tokens 64: the arm 'paired' cannot be built; give longer rows"),
        (["--seeds", "2"], "--seeds 2: expected at least 3"),
        (["--steps", "9"], "--steps 9: expected at least 10"),
    ):
        with pytest.raises(UserError, match=message):
            compare.read_arguments([*words, *wrong])


def test_each_pair_is_drawn_once_and_every_value_on_its_scale(comparison, tmp_path):
    record = deepcopy(comparison[0])
    record["rows"][1]["minus_first"]["time"]["difference"]["mean"] = 0.6  # far beyond those of the other budgets
    figure = compare.plot(record)
    plots.save_plot(figure, tmp_path / "plot.png")
    figure.draw_without_rendering()
    by_time, *by_budget = figure.axes
    for axes in by_budget:
        assert [text.get_text() for text in axes.get_yticklabels()] == ["paired"]
        assert not axes.texts  # no number stands in for a dot
    low, high = by_budget[-1].get_xlim()
    assert low < 0.6 < high
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["windows", "paired"]
    assert by_time.get_legend() is None and legend.get_window_extent().y1 <= by_time.get_tightbbox().y0

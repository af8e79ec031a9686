"""Test the protocol of comparisons, and the studies that keep to it: language models, equal cache and the ladder."""

import argparse
import math
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import nn

from common.command_io import UserError
from kinds.model_cost import model as cost_of
from modeling_iha import IHAForCausalLM
from modeling_iha.mixing import mixing_parameters
from research.experiments import equal_cache, ladder, language_models, protocol
from research.experiments.language_models import VARIANTS, config_of, size_of


TINY = language_models.sized(width=16, ffn=48, layers=5, heads=4, tokens_per_step=64, tokens=32, steps=4)
MHA, IHA, DCMHA = (language_models.build(TINY, attention_kinds=kind) for kind in ("mha", "iha", "dcmha"))
TEXT = (torch.arange(2000) * 7 % 50).to(torch.uint8)


# The protocol


@pytest.mark.parametrize(
    ("best", "expected"), [(1.0, [1, 2, 0.5]), (4.0, [1, 2, 4, 8]), (0.25, [1, 2, 0.5, 0.25, 0.125])]
)
def test_a_rate_is_followed_as_long_as_the_loss_falls(best, expected):
    tried = []

    def loss_at(rate: float) -> float:
        tried.append(rate)
        return abs(math.log(rate / best))

    assert protocol.walk(loss_at, 1.0, 2.0) == best and tried == expected


def test_the_mixing_is_tuned_beside_the_best_rate_and_a_diverged_run_is_never_the_best():
    def end_of(rate: float, mixing: float) -> float:
        return math.nan if rate > protocol.FIRST_RATE else abs(math.log(mixing / 4))

    assert protocol.tune(lambda rate, mixing: math.nan if rate > 2e-3 else 1.0, mixes=False).rate == 2e-3
    rates = protocol.tune(end_of, mixes=True)
    assert (rates.rate, rates.mixing) == (protocol.FIRST_RATE, 4.0)
    assert [tried[:2] for tried in rates.tried[:3]] == [[4e-3, 1.0], [8e-3, 1.0], [2e-3, 1.0]]
    assert protocol.tune(end_of, mixes=False).mixing == 1.0


def test_a_kind_has_mixing_if_its_options_leave_it_any():
    static = language_models.build(TINY, attention_kinds="dcmha", attention_options={"dcmha": {"base_map": True}})
    assert [protocol.has_mixing(config) for config in (MHA, IHA, DCMHA, static)] == [False, True, False, True]


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
    with pytest.raises(UserError, match="--most-seeds 5: expected at least 6"):
        compared(tmp_path, 5, 0.01)
    for fewest, most in ((6, 9), (2, 3)):
        monkeypatch.setattr(protocol, "FEWEST_SEEDS", fewest)
        runs = compared(tmp_path / f"wide-{most}", most, 1.0)[1]
        assert {len(of_variant) for of_variant in runs.values()} == {most}


def test_budgets_are_read_where_the_dearer_side_has_spent_what_the_cheaper_one_has():
    def runs(*values: float, seconds: float) -> list[dict]:
        return [{"curve": [[0, 10.0 + value], [10, value]], "seconds": seconds} for value in values]

    sides = {"base": runs(1.0, 2.0, seconds=2.0), "dear": runs(0.5, 1.5, seconds=8.0)}
    found = protocol.budgets(sides, "dear", "base", (2.0, 1.0))
    assert [found[budget]["cost"] for budget in protocol.BUDGETS] == [1.0, 2.0, 1.0, 4.0]
    assert [each["difference"]["mean"] for each in found.values()] == [-0.5, 4.5, -0.5, 7.0]
    cheap = protocol.budgets(sides, "base", "dear", (0.5, 1.0))
    assert [each["difference"]["mean"] for each in cheap.values()] == [0.5, -4.5, 0.5, -7.0]


def test_training_evaluates_the_mean_of_the_weights_and_mixing_has_its_own_rate(monkeypatch):
    torch.manual_seed(0)
    model = IHAForCausalLM(config_of(size_of(TINY, 32), **VARIANTS["iha_2"]))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    seen = []

    def evaluate(averaged: nn.Module, step: int) -> list[float]:
        seen.append(averaged.model.embed_tokens.weight.clone())
        return [0.0]

    rows = language_models.rows_of(TEXT, torch.tensor([0, 40]), 32)
    monkeypatch.setattr(protocol, "AVERAGE", 0.5)
    states = []

    def loss() -> torch.Tensor:
        states.append(model.model.embed_tokens.weight.detach().clone())
        return language_models.losses_of(model, rows).mean()

    protocol.fit(model, loss, evaluate, 2, 1e-2, 0.0, 2)
    states.append(model.model.embed_tokens.weight.detach())
    assert seen[0].equal(states[0])
    torch.testing.assert_close(seen[-1], (states[1] + states[2]) / 2)
    # Adam's first step is as long as the rate.
    assert (states[1] - states[0]).abs().max().item() == pytest.approx(1e-2 / protocol.WARM_UP, rel=1e-3)
    moved = {value for name, value in model.named_parameters() if not value.equal(start[name])}
    assert moved and mixing_parameters(model) and moved.isdisjoint(mixing_parameters(model))


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
    assert mean(part["mean"] for part in row["by_part"]) == pytest.approx(row["loss"]["mean"], rel=1e-5)


def one_run(size: dict, text: torch.Tensor, variant: str = "mha", seed: int = 0) -> dict:
    return language_models.one_run(VARIANTS[variant], size, text, "cpu", variant, seed, 1e-2, 1.0)


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


def test_a_text_is_part_of_the_setting_and_rows_have_a_length_that_fits():
    args = argparse.Namespace(device="cpu")
    texts = [torch.tensor(list(text.encode())) for text in ("To be, or not to be.", "To be, or not to me.")]
    first, second = (language_models.setting_of(args, TINY, text) for text in texts)
    assert first != second and first["text_sha256"] != second["text_sha256"]
    for tokens in (31, 65):
        with pytest.raises(UserError, match="expected at least 32, at most 64"):
            size_of(TINY, tokens)
    assert len(language_models.read_text()) > 2_000_000


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


def test_evaluations_do_not_count_as_training_time(monkeypatch):
    """Let a step take a second, and a batch of an evaluation a hundred."""
    now, losses_of = [0], language_models.losses_of

    def slow(model, rows):
        now[0] += 1 if torch.is_grad_enabled() else 100
        return losses_of(model, rows)

    monkeypatch.setattr(language_models, "losses_of", slow)
    monkeypatch.setattr(protocol, "clock", lambda device: now[0])
    assert one_run(size_of(TINY, 32), TEXT)["seconds"] == TINY["steps"]


# Equal cache


def test_interleaving_is_compared_with_a_cache_as_many_times_as_large(run_protocol):
    sizes = {"SMALL": TINY, "SERVED": {**TINY, "tokens": 64}, "REPEATS": 1, "TOKENS": 32, "PROMPT": 8}
    table, _ = run_protocol(equal_cache, sizes, ["mha_g1", "mha_g2", "iha_g1_p2"])
    _, larger, row = table["rows"]
    apart = row["minus_control"]["steps"]["difference"]
    assert apart["mean"] == pytest.approx(mean(row["loss"]["values"]) - mean(larger["loss"]["values"]))
    assert row["control"] == "mha_g2" and "minus_control" not in larger and "p_holm" in apart
    assert larger["cached_bytes"] == 2 * row["cached_bytes"] == 4 * 2 * 2 * 4
    assert row["seconds_per_token"] > 0


# The ladder


def test_lookups_ask_for_the_values_of_k_keys():
    words, targets = ladder.draw("lookups", 3, 5, torch.Generator().manual_seed(0))
    assert words.shape == (5, 32, 3) and targets.shape == (5, 32, 3)
    assert (targets[:, :16] == ladder.IGNORED).all() and (words[:, :16, 2] == -1).all()
    for row, answers in zip(words.tolist(), targets.tolist()):
        value_of = {key: value - 16 for key, value, _ in row[:16]}
        assert sorted(value_of) == list(range(16))
        for question, expected in zip(row[16:], answers[16:]):
            asked = [word - 24 - 16 * slot for slot, word in enumerate(question)]
            assert len(set(asked)) == 3 and [value_of[key] for key in asked] == expected


def test_offsets_ask_for_what_is_behind_and_nothing_before_the_start():
    words, targets = ladder.draw("offsets", 4, 3, torch.Generator().manual_seed(0))
    for row, answers in zip(words.squeeze(-1).tolist(), targets.tolist()):
        for place, expected in enumerate(answers):
            behind = [place - distance for distance in ladder.DISTANCES[:4]]
            assert expected == [row[other] if other >= 0 else ladder.IGNORED for other in behind]


@pytest.mark.parametrize("task", ladder.TASKS)
def test_models_of_the_ladder_have_equal_parameters(task):
    counts = {
        sum(parameter.numel() for parameter in ladder.Model(variant, task, k).parameters())
        for variant in ladder.VARIANTS
        for k in ladder.NUMBERS
    }
    assert max(counts) - min(counts) <= 3 * ladder.SIZE["fields"]["hidden_size"]


def test_the_ladder_tunes_on_other_seeds_and_goes_on_where_it_stopped(run_study, tmp_path):
    variants = {name: ladder.VARIANTS[name] for name in ("mha 2", "iha 2 x 2")}
    sizes = {"STEPS": 2, "TEST_ROWS": 4, "NUMBERS": (2, 4), "VARIANTS": variants}
    table, made = run_study(ladder, ["--tasks", "offsets", "--seeds", "0", "1"], sizes, {"STEPS": 3})
    assert made[0] >= 4 * 4 and made[1] == 0
    names = {path.stem.split("-", 3)[3] for path in (tmp_path / "runs").glob("*.json")}
    assert {name.rpartition("-")[2] for name in names} == {"1000_1001", "0_1"}
    assert [(row["variant"], row["k"]) for row in table["rows"]] == [(name, k) for k in (2, 4) for name in variants]
    base, row = table["rows"][2:]
    assert row["minus_mha_2"]["mean"] == pytest.approx(row["right"]["mean"] - base["right"]["mean"])
    assert row["tried"][0][0] == ladder.FIRST_RATE and row["rate"] in dict(row["tried"]) and len(row["tried"]) >= 3
    assert all(0 <= wrong <= 1 for _, wrong in row["tried"])

"""Test the studies that train from scratch: their data, their tables, and that they go on where they stopped."""

import itertools
import json
from statistics import mean, stdev

import pytest
import torch
from helpers import random_model, small_config
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from common.command_io import UserError
from experiments import head_diversity, language_models, relation_composition, study
from kinds.model_cost import model as cost_of
from modeling_iha import IHAForCausalLM
from modeling_iha.attention_kinds import ATTENTION_CLASSES


TINY_RELATIONS = {
    "tasks": {"binary": (2, 2, 3, 0.5)},
    "heads": 2,
    "head_dim": 4,
    "train": 70,
    "test": 10,
    "epochs": 2,
    "rates": [1e-2],
}
TINY_TEXT = {
    "fields": {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    "tokens": 8,
    "batch": 2,
    "steps": 4,
    "rate": 1e-2,
}


@pytest.mark.parametrize("task", [(2, 2, 4, 0.4), (3, 1, 3, 0.5)], ids=["binary", "ternary"])
def test_a_relation_is_read_in_order_and_composed_as_by_hand(task):
    steps, smallest, largest, _ = task
    examples = relation_composition.draw(task, 40, torch.Generator().manual_seed(0))
    sizes = set()
    for entries, rows, columns, is_real, targets in zip(*examples):
        count = int(is_real.sum())
        size = round(count**0.5)
        sizes.add(size)
        assert is_real.tolist() == [True] * count + [False] * (largest**2 - count)
        assert list(zip(rows[:count].tolist(), columns[:count].tolist())) == [
            (i, j) for i in range(size) for j in range(size)
        ]
        holds = [[bool(entries[i * size + j]) for j in range(size)] for i in range(size)]

        def reached(i: int, j: int, left: int) -> bool:
            if left == 1:
                return holds[i][j]
            return any(holds[i][k] and reached(k, j, left - 1) for k in range(size))

        expected = [reached(i, j, steps) for i in range(size) for j in range(size)]
        assert targets[:count].tolist() == expected
    assert sizes == set(range(smallest, largest + 1))


@pytest.mark.parametrize("kind", ["mha", "iha", "simplicial", "diff"])
def test_every_entry_sees_every_entry_and_no_padding(kind):
    examples = relation_composition.draw((2, 2, 3, 0.5), 20, torch.Generator().manual_seed(0))
    small = next(index for index, real in enumerate(examples.is_real) if real.sum() == 4)
    large = next(index for index, real in enumerate(examples.is_real) if real.sum() == 9)
    torch.manual_seed(0)
    model = relation_composition.RelationModel(kind, heads=2, head_dim=4, largest=3)
    padded, alone = (next(examples.batches(torch.tensor(chosen))) for chosen in ([small, large], [small]))
    assert alone.entries.shape == (1, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[:1, :4], model(alone))
        for entry in range(4):
            flipped = alone._replace(entries=alone.entries.clone())
            flipped.entries[0, entry] ^= 1
            assert ((model(flipped) - model(alone)).abs() > 1e-6).all()


def results(directory, name: str) -> dict:
    assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((directory / f"{name}.json").read_text())


def test_relation_composition_compares_on_equal_seeds_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(relation_composition, "SMALL", TINY_RELATIONS)
    where = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path), "--kinds", "mha", "iha"]
    relation_composition.main([*where, "--seeds", "0"])
    assert capsys.readouterr().out.count("epoch 2") == 2
    relation_composition.main([*where, "--seeds", "0", "1", "1"])
    assert capsys.readouterr().out.count("epoch 2") == 2
    table = results(tmp_path, "relation_composition")
    assert len(table["runs"]) == 4 and len(table["rows"]) == 2
    tests = {kind: [run["test"] for run in table["runs"] if run["kind"] == kind] for kind in ("mha", "iha")}
    mha, iha = table["rows"]
    assert [row["accuracy"]["mean"] for row in (mha, iha)] == pytest.approx([mean(each) for each in tests.values()])
    assert mha["iha_is_higher_by"]["mean"] == pytest.approx(mean(tests["iha"]) - mean(tests["mha"]))

    monkeypatch.setattr(relation_composition, "SMALL", {**TINY_RELATIONS, "epochs": 1})
    with pytest.raises(UserError, match="another setting: remove it"):
        relation_composition.main([*where, "--seeds", "0"])


def test_training_stops_when_the_validation_loss_no_longer_falls(monkeypatch):
    """And the test accuracy is that of the best epoch, not of the last."""
    validation = [(loss, 0.0) for loss in (0.5, 0.4, 0.6, 0.3, 0.9, 0.9, 0.9)]
    scores = iter([pair for epoch, loss in enumerate(validation, 1) for pair in (loss, (0.0, epoch / 100))])
    monkeypatch.setattr(relation_composition, "score", lambda *args: next(scores))
    monkeypatch.setattr(relation_composition, "PATIENCE", 3)
    size = {**TINY_RELATIONS, "epochs": 50}
    run = relation_composition.train((2, 2, 3, 0.5), size, "mha", 1e-3, 0, "cpu", "run")
    assert len(run["curves"]) == 7 and run["epoch"] == 4 and run["test"] == 0.04


@pytest.mark.parametrize("kind", ATTENTION_CLASSES)
def test_language_models_have_equal_parameters(kind):
    """To half a channel of the FFN, and the cost model counts them as PyTorch does."""
    size = language_models.SMALL
    config = language_models.config_of(kind, size)
    count = sum(parameter.numel() for parameter in IHAForCausalLM(config).parameters())
    assert count == cost_of(config, size["tokens"]).parameters
    base = cost_of(language_models.config_of("mha", size), size["tokens"]).parameters
    assert abs(count - base) <= 3 * 64 * 2 / 2


def test_language_models_compare_and_go_on_where_they_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(language_models, "SMALL", TINY_TEXT)
    monkeypatch.setattr(language_models, "memory", lambda *args: {"extra_bytes": 5})
    where = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path), "--kinds", "mha", "iha"]
    language_models.main([*where, "--seeds", "0"])
    assert capsys.readouterr().out.count("step 4 of 4") == 2
    language_models.main([*where, "--seeds", "0", "1"])
    assert capsys.readouterr().out.count("step 4 of 4") == 2
    table = results(tmp_path, "language_models")
    mha, iha = table["rows"]
    ends = {
        kind: [
            json.loads((tmp_path / "runs" / f"{kind}-{seed}.json").read_text())["curve"][-1][1] for seed in range(2)
        ]
        for kind in ("mha", "iha")
    }
    assert mha["loss"]["mean"] == pytest.approx(mean(ends["mha"])) and mha["loss"] == mha["loss_at_equal_flops"]
    assert iha["loss_minus_mha"]["mean"] == pytest.approx(mean(ends["iha"]) - mean(ends["mha"]))
    assert iha["flops"] > 1 and iha["loss_at_equal_flops"] != iha["loss"] and iha["extra_bytes"] == 5

    other = tmp_path / "other.txt"
    other.write_text("To be, or not to be, that is the question. " * 10)
    with pytest.raises(UserError, match="another setting"):
        language_models.main([*where, "--seeds", "0", "--text", str(other)])
    for content in ("short", ""):
        other.write_text(content)
        with pytest.raises(UserError, match=f"has {len(content)} bytes: expected at least 160"):
            language_models.main([*where, "--text", str(other)])
    with pytest.raises(UserError, match="cannot be read"):
        language_models.main([*where, "--text", str(tmp_path / "missing")])


def test_the_loss_between_two_evaluations():
    curve = [[0, 4.0], [10, 2.0], [20, 1.0]]
    assert [language_models.loss_at(curve, step) for step in (0, 5, 10, 18, 20)] == [4.0, 3.0, 2.0, 1.2, 1.0]


def test_the_held_out_text_is_never_trained_on(monkeypatch):
    """Bytes of the last tenth are ones, all others zeros."""
    text = torch.zeros(400, dtype=torch.long)
    text[360:] = 1
    seen = {True: set(), False: set()}
    loss_of = language_models.loss_of

    def watch(model, rows):
        seen[torch.is_grad_enabled()].update(rows.unique().tolist())
        return loss_of(model, rows)

    monkeypatch.setattr(language_models, "loss_of", watch)
    language_models.one_run("mha", 0, {**TINY_TEXT, "batch": 200}, text, "cpu")
    assert seen == {True: {0}, False: {1}}


def test_evaluations_do_not_count_as_training_time(monkeypatch):
    """A step takes a second here, and a batch of an evaluation a hundred."""
    now, loss_of = [0], language_models.loss_of

    def slow(model, rows):
        now[0] += 1 if torch.is_grad_enabled() else 100
        return loss_of(model, rows)

    monkeypatch.setattr(language_models, "loss_of", slow)
    monkeypatch.setattr(study, "clock", lambda device: now[0])
    run = language_models.one_run("mha", 0, TINY_TEXT, torch.arange(200) % 7, "cpu")
    assert run["tokens_per_second"] == TINY_TEXT["batch"] * TINY_TEXT["tokens"]


def test_intervals_over_seeds():
    """Student's t for the mean of 1, 2, 3, 4, 5: 3 ± 2.776 * sqrt(2.5 / 5)."""
    assert study.interval([1.0, 2.0, 3.0, 4.0, 5.0]) == {
        "mean": 3.0,
        "half_width": pytest.approx(1.96324, abs=1e-4),
    }
    # 2.2010 and 2.0860, for 11 and 20 degrees of freedom.
    for quantile, count in ((2.2010, 12), (2.0860, 21)):
        values = [(-1.0) ** index for index in range(count)]
        assert study.interval(values)["half_width"] == pytest.approx(quantile * stdev(values) / count**0.5, rel=2e-3)
    assert study.interval([7.0]) == {"mean": 7.0, "half_width": None}


def test_a_gpu_is_asked_for_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU here; use --device cpu"):
        relation_composition.main(["--device", "cuda", "--results", str(tmp_path)])


@pytest.mark.parametrize("geometry", ["mha", "iha", "iha, all heads"])
def test_head_diversity_is_that_of_every_circuit_written_out(geometry):
    """Each circuit as a matrix [width, width], for all pairs of pseudo-heads."""
    collapse = "all_heads" if "all" in geometry else "per_head"
    groups = 2 if geometry == "iha" else 4
    config = small_config(
        attention_kinds=geometry.split(",")[0],
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=groups,
        num_pseudo_heads=3,
        pseudo_collapse=collapse,
    )
    attention = random_model(config).model.layers[0].self_attn
    size, per_group = config.head_dim, 4 // groups

    def heads(projection, count):
        return [projection.weight[size * m : size * (m + 1)] for m in range(count)]

    query, key, value = (
        heads(attention.q_proj, 4),
        heads(attention.k_proj, groups),
        heads(attention.v_proj, groups),
    )
    output = [attention.o_proj.weight[:, size * h : size * (h + 1)] for h in range(4)]
    if geometry == "mha":
        looks = [query[h].T @ key[h] for h in range(4)]
        moves = [output[h] @ value[h] for h in range(4)]
    else:

        def pseudo(sources, mixing, h, p):
            return sum(mixing.weight[m, h, p] * source for m, source in enumerate(sources))

        pairs = list(itertools.product(range(4), range(3), range(3)))
        looks = [
            pseudo(query, attention.q_mix, h, p).T @ pseudo(key, attention.k_mix, h // per_group, q)
            for h, p, q in pairs
        ]
        weight = attention.collapse.weight
        moves = []
        for h, p, q in pairs:
            moved = pseudo(value, attention.v_mix, h // per_group, q)
            if collapse == "per_head":
                moves.append(weight[h, p] * output[h] @ moved)
            else:
                moves += [weight[g, 3 * h + p] * output[g] @ moved for g in range(4)]
    measured = head_diversity.Heads(attention, 4, groups).grams()
    for name, circuits in (("QK", looks), ("OV", moves)):
        variance = torch.linalg.svdvals(torch.cat(circuits).double()).square()
        expected = variance.cumsum(0) / variance.sum()
        torch.testing.assert_close(head_diversity.captured(measured[name]), expected, atol=1e-5, rtol=0)


def test_equal_heads_are_less_diverse(tmp_path, capsys):
    model = random_model(small_config(attention_kinds="mha", num_attention_heads=4, num_key_value_heads=4))
    model.save_pretrained(tmp_path / "diverse")
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                weight = getattr(layer.self_attn, name).weight
                weight.copy_(weight[: len(weight) // 4].repeat(4, 1))
    model.save_pretrained(tmp_path / "equal")
    head_diversity.main([str(tmp_path / "diverse"), str(tmp_path / "equal"), "--results", str(tmp_path)])
    diverse, equal = results(tmp_path, "head_diversity")["rows"]
    assert (diverse["model"], equal["model"]) == ("diverse", "equal")
    assert equal["QK"]["mean"] > diverse["QK"]["mean"] and equal["OV"] == diverse["OV"]
    curve = {"QK": torch.tensor([0.5, 0.89, 0.91, 1.0])}
    assert head_diversity.summary("org/name", curve) == {
        "model": "org/name",
        "QK": {"mean": pytest.approx(0.825), "for_90_percent": 0.75},
    }


def test_models_without_circuits_are_refused(tmp_path):
    random_model(small_config(attention_kinds="simplicial")).save_pretrained(tmp_path / "simplicial")
    with pytest.raises(UserError, match="layer 0 has several keys for each token"):
        head_diversity.main([str(tmp_path / "simplicial"), "--results", str(tmp_path)])
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=8)).save_pretrained(tmp_path / "gpt_neox")
    for name in ("gpt2", "gpt_neox"):
        with pytest.raises(UserError, match=f"is a '{name}' model: expected Llama's projections"):
            head_diversity.main([str(tmp_path / name), "--results", str(tmp_path)])

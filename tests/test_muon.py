"""Test the optimizer of examples/muon.py, and its comparison in small."""

from copy import deepcopy

import pytest
import torch

from examples import muon
from modeling_iha import IHAConfig, IHAForCausalLM, mixing_parameters


def trained(model, optimizer, schedule, steps: int, begin: int = 0) -> None:
    """Take steps of a schedule on rows that the number of the step draws."""
    for number in range(begin, begin + steps):
        rows = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(number))
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_muon_gets_projections_alone():
    model = IHAForCausalLM(IHAConfig.from_preset("tiny", attention_kinds="iha"))
    matrices, rest = (
        {id(weight) for group in part.param_groups for weight in group["params"]}
        for part in muon.muon(model, 1e-3).parts
    )
    names = {name for name, weight in model.named_parameters() if id(weight) in matrices}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert {id(weight) for weight in mixing_parameters(model)} <= rest
    assert len(matrices) + len(rest) == len(list(model.parameters()))


def test_two_optimizers_step_as_one_and_resume():
    """Compare with steps of each alone, and with a run that is saved after two of four steps."""
    torch.manual_seed(0)
    model = IHAForCausalLM(IHAConfig.from_preset("tiny"))
    apart, resumed = deepcopy(model), deepcopy(model)
    together = muon.muon(model, 1e-2)
    trained(model, together, halving(together), 4)
    parts = muon.muon(apart, 1e-2).parts
    schedules = [halving(part) for part in parts]
    for number in range(4):
        rows = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(number))
        apart(rows, labels=rows).loss.backward()
        for part, schedule in zip(parts, schedules):
            part.step()
            part.zero_grad()
            schedule.step()
    begun = muon.muon(resumed, 1e-2)
    schedule = halving(begun)
    trained(resumed, begun, schedule, 2)
    saved, of_schedule = deepcopy(begun.state_dict()), schedule.state_dict()
    begun = muon.muon(resumed, 1e-2)
    schedule = halving(begun)
    begun.load_state_dict(saved)
    schedule.load_state_dict(of_schedule)
    trained(resumed, begun, schedule, 2, begin=2)
    for one, alone, again in zip(model.parameters(), apart.parameters(), resumed.parameters()):
        assert one.equal(alone) and one.equal(again)


@pytest.mark.slow
def test_a_comparison_goes_on_after_a_stop(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(muon, "PRESETS", {"tiny": {}})
    monkeypatch.setattr(muon, "RATES", dict.fromkeys(muon.OPTIMIZERS, (1e-3, 1e-2)))
    monkeypatch.setattr(muon, "SEEDS", (0, 1))
    made, muon_of = [], muon.OPTIMIZERS["muon"]

    def counted(model, rate):
        made.append(rate)
        if len(made) == 2:
            raise KeyboardInterrupt
        return muon_of(model, rate)

    monkeypatch.setitem(muon.OPTIMIZERS, "muon", counted)
    (tmp_path / "text.txt").write_text("All that glisters is not gold. " * 400)
    with pytest.raises(KeyboardInterrupt):
        muon.compare(tmp_path / "text.txt", tmp_path / "out", 2)
    table = muon.compare(tmp_path / "text.txt", tmp_path / "out", 2)
    assert made[:3] == [1e-3, 1e-2, 1e-2] and len(made) == 5  # two rates, one of them again, and two seeds
    assert table.count("| tiny |") == 3 and "at the edge of the rates" in table and "muon - adamw" in table
    printed = capsys.readouterr().out
    assert muon.compare(tmp_path / "text.txt", tmp_path / "out", 2) == table and len(made) == 5
    assert "tiny-muon-0.01-100-2: " in printed

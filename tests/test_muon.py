"""Test the optimizer of examples/muon.py."""

from copy import deepcopy

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

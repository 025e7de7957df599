"""Parameters and buffers of all stages: what ranks must agree on, what is refused, how all get the trained model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.errors import MismatchError
from distconv.pipeline import Pipeline
from distconv.pipeline.schedules.actions import ScheduleError
from distconv.pipeline.stage.stage_state import broadcast_stage, collect_state, describe_stages, find_shared
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.pipeline.training import convolutions, states


@pytest.mark.ranks(2)
def test_buffers_that_two_stages_share_raise(comm):
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(2)
    stages = [shared, nn.Sequential(nn.Linear(2, 2), shared)]
    raises_everywhere(
        comm,
        ScheduleError,
        r"0\.running_mean and 1\.1\.running_mean are one buffer",
        lambda: Pipeline(stages, comm, "gpipe", F.mse_loss),
    )


ANOTHER = {
    "weights": r"the first is '0\.0\.weight'",
    "shapes": r"1\.1\.weight \(2, 2, 1, 1\)",
    "a buffer": r"the first is '0\.1\.running_mean'",
    "a stage": "Sequential, Sequential, Tanh",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ANOTHER)
def test_another_model_on_one_rank_is_a_mismatch_that_names_what(comm, what):
    stages = convolutions(2)
    if comm.rank == 1:
        if what == "weights":
            stages[0][0].weight.data[0, 0, 0, 0] += 1e-15
        elif what == "shapes":
            stages[1][1] = nn.Conv2d(2, 2, 1).double()
        elif what == "a buffer":
            stages[0][1].running_mean[0] = 3.0
        else:
            stages.append(nn.Tanh())
    raises_everywhere(comm, MismatchError, ANOTHER[what], lambda: Pipeline(stages, comm, "gpipe", F.cross_entropy))


def test_state_is_parameters_and_buffers_of_all_stages_by_name():
    stages = [nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.BatchNorm1d(3))]
    found = collect_state(stages)
    assert found.keys() == states(stages).keys()
    assert found["0.weight"] is stages[0].weight and found["1.1.running_var"] is stages[1][1].running_var


def test_ranks_compare_kinds_of_stages_shapes_and_dtypes_but_no_values():
    def of(extent, dtype=torch.float32):
        return describe_stages([nn.Linear(2, extent, bias=False).to(dtype), nn.Tanh()])

    assert of(3) == of(3) == "Linear, Tanh; 0.weight (3, 2) torch.float32"
    assert len({of(3), of(4), of(3, torch.float64), describe_stages([nn.Linear(2, 3, bias=False)])}) == 4
    assert describe_stages([nn.Tanh(), torch.tanh]) == "Tanh, builtin_function_or_method; "


def test_parameters_that_stages_on_different_ranks_share_are_found_and_shared_buffers_raise():
    shared = nn.Linear(2, 2)
    parts = [nn.Tanh(), nn.Tanh(), shared, nn.Tanh(), nn.Sequential(shared), nn.Tanh()]
    assert find_shared(parts, count=2) == []  # chunks of one rank
    assert find_shared(parts, count=3) == [["2.weight", "4.0.weight"], ["2.bias", "4.0.bias"]]
    norm = nn.BatchNorm1d(2)
    with pytest.raises(ScheduleError, match=r"0\.running_mean and 1\.0\.running_mean are one buffer"):
        find_shared([norm, nn.Sequential(norm)], count=2)


def test_what_is_distributed_already_is_refused(comm):
    stages = [nn.Tanh(), nn.Tanh()]
    stages[1].register_buffer("table", dc.scatter(torch.ones(4, 2), grid_over(comm, n=comm.size)))
    raises_everywhere(
        comm, ScheduleError, "stage 1: 1.table is already distributed", lambda: find_shared(stages, count=2)
    )


@pytest.mark.ranks(2, 3)
def test_the_state_of_its_owner_comes_to_all_ranks(comm):
    torch.manual_seed(comm.rank)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    module(normal(4, 2, seed=comm.rank))  # statistics differ, too
    before = comm.allgather({name: value.clone() for name, value in module.state_dict().items()})
    assert not torch.equal(before[0]["0.weight"], before[1]["0.weight"])
    broadcast_stage(comm, module, root=1, owned=comm.rank == 1)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[1][name]), name

"""Optimizers whose state is split over ranks, against torch's on one process: every step, every way to use them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

import distconv as dc
from distconv.parameters.optimizer_state import split_of
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import close, whole

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda groups: torch.optim.Adam(groups, 0.01, amsgrad=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 0.05),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.unused = nn.Parameter(torch.ones(3))
        self.hidden, self.head = nn.Linear(6, 7), nn.Linear(7, 5)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.norm(self.first(x)))))
        return self.head(F.relu(self.hidden(x.mean((2, 3)))))


def several(comm):
    """Grids, one of them with weights that only some ranks share."""
    found = [grid_over(comm, n=comm.size), grid_over(comm, h=comm.size)]
    return [*found, grid_over(comm, c=2, n=comm.size // 2)] if comm.size % 2 == 0 else found


class Case:
    """A model and its optimizer, on one process (``grid`` None) or with the state split."""

    def __init__(self, grid, make):
        torch.manual_seed(3)
        self.grid, self.model = grid, Net().double()
        if grid is not None:
            dc.parallelize(self.model, grid)
        small = [p for p in self.model.parameters() if p.dim() == 1]
        large = [p for p in self.model.parameters() if p.dim() > 1]
        self.optimizer = make([{"params": small, "lr": 0.002}, {"params": large}])
        if grid is not None:
            assert dc.shard_optimizer(self.optimizer, grid.world) is self.optimizer

    def loss(self, seed):
        x, label = normal(4, 3, 7, 9, seed=seed), torch.tensor([0, 3, 1, 4])
        if self.grid is not None:
            x, label = dc.scatter(x, self.grid), dc.scatter(label, self.grid, dims="n")
        return F.cross_entropy(self.model(x), label)

    def step(self, seed, **more):
        self.optimizer.zero_grad()
        self.loss(seed).backward()
        self.optimizer.step(**more)


def same(case, reference):
    """Check weights, gradients and the whole state dicts, on every rank."""
    for (name, found), expected in zip(case.model.named_parameters(), reference.model.parameters(), strict=True):
        close(whole(found), expected.detach(), name)
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            close(whole(found.grad), expected.grad, f"gradient of {name}")
    found, expected = case.optimizer.state_dict(), reference.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert list(found["state"][number]) == list(entries)
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                close(found["state"][number][key], value, f"{key} of {number}")
            else:
                assert found["state"][number][key] == value


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_step_is_that_of_one_process(comm, name):
    reference = Case(None, OPTIMIZERS[name])
    cases = [Case(grid, OPTIMIZERS[name]) for grid in several(comm)]
    for seed in range(3):
        reference.step(seed)
        for case in cases:
            case.step(seed)
            same(case, reference)


@pytest.mark.ranks(at_least=2)
def test_parameters_are_dealt_out_by_their_elements_not_by_their_number(comm):
    """One of 6 elements, and three of 2 for each other rank, come to 6 on each."""
    others = 3 * (comm.size - 1)
    parameters = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (*[2] * others, 6)]
    optimizer = dc.shard_optimizer(torch.optim.Adam(parameters), comm)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(entries["exp_avg"].numel() for entries in optimizer.state.values())
    assert comm.allgather(held) == [6] * comm.size
    # One that comes later goes to the first of those that have least.
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float64))]})
    optimizer.param_groups[1]["params"][0].grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    assert comm.allgather(len(optimizer.state)) == [2, *[3] * (comm.size - 1)]


def with_closure(case):
    def closure():
        case.optimizer.zero_grad()
        loss = case.loss(5)
        loss.backward()
        return loss

    case.loss(4).backward()
    return case.optimizer.step(closure).item()


def scaled(case):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for seed in range(3):
        case.optimizer.zero_grad()
        # A gradient that overflows skips a step on all ranks.
        scaler.scale(case.loss(seed) * (float("inf") if seed == 1 else 1)).backward()
        scaler.unscale_(case.optimizer)
        scaler.step(case.optimizer)
        scaler.update()
    case.optimizer.zero_grad()
    return scaler.get_scale()


def with_another_group(case):
    case.step(0)
    last = nn.Parameter(torch.linspace(0, 1, 11, dtype=torch.float64))
    case.optimizer.add_param_group({"params": [last], "lr": 0.3})
    for _ in range(2):
        case.optimizer.zero_grad()
        (last**3).sum().backward()
        case.loss(1).backward()
        case.optimizer.step()
    return last.tolist()


def frozen_for_a_while(case):
    case.step(0)
    case.model.hidden.requires_grad_(False)
    case.step(1)
    case.model.hidden.requires_grad_(True)
    case.step(2)


def changed_through_the_state_dict(case):
    case.step(0)
    for entries in case.optimizer.state_dict()["state"].values():
        entries["exp_avg"].zero_()
    case.step(1)


SCENARIOS = [with_closure, scaled, with_another_group, frozen_for_a_while, changed_through_the_state_dict]


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_people_do_around_a_step_is_as_in_one_process(comm, scenario):
    for grid in several(comm):
        reference, case = Case(None, OPTIMIZERS["Adam"]), Case(grid, OPTIMIZERS["Adam"])
        found, expected = scenario(case), scenario(reference)
        assert found is expected is None or found == pytest.approx(expected, rel=1e-11)
        same(case, reference)


@pytest.mark.long
def test_state_is_loaded_from_one_process_and_by_it(comm):
    for grid in several(comm):
        reference, case = Case(None, OPTIMIZERS["Adam"]), Case(grid, OPTIMIZERS["Adam"])
        reference.step(0)
        case.model.load_state_dict(reference.model.state_dict())
        case.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
        split = split_of(case.optimizer)
        assert comm.size == 1 or all(split.is_owned(p) for p in case.optimizer.state)
        case.step(1)
        reference.step(1)
        same(case, reference)
        other = Case(None, OPTIMIZERS["Adam"])
        other.model.load_state_dict({key: t.clone() for key, t in case.model.state_dict().items()})
        other.optimizer.load_state_dict(copy.deepcopy(case.optimizer.state_dict()))
        other.step(2)
        reference.step(2)
        same(other, reference)


@pytest.mark.long
def test_checkpoints_have_the_whole_state_and_any_grid_goes_on_from_them(comm, shared_tmp_path):
    grids = several(comm)
    reference = Case(None, OPTIMIZERS["Adam"])
    for seed in range(3):
        reference.step(seed)
    for number, (grid, after) in enumerate(zip(grids, [*grids[1:], grids[0]], strict=True)):
        first, second = Case(grid, OPTIMIZERS["Adam"]), Case(after, OPTIMIZERS["Adam"])
        first.step(0)
        first.step(1)
        folder = shared_tmp_path / str(number)
        dc.save_checkpoint(folder, 2, first.model, first.optimizer, comm=comm)
        assert dc.load_checkpoint(folder, second.model, second.optimizer, comm=comm).step == 2
        split = split_of(second.optimizer)
        assert comm.size == 1 or all(split.is_owned(p) for p in second.optimizer.state)
        second.step(2)
        same(second, reference)


def test_state_from_before_is_dealt_out(comm):
    """A few steps with whole state, then the split."""
    grid, reference = grid_over(comm, n=comm.size), Case(None, OPTIMIZERS["Adam"])
    torch.manual_seed(3)
    case = Case(None, OPTIMIZERS["Adam"])
    case.grid = grid
    dc.parallelize(case.model, grid)
    for each in (case, reference):
        each.step(0)
    dc.shard_optimizer(dc.shard_optimizer(case.optimizer, comm), comm)
    counts = comm.allgather(len(case.optimizer.state))
    # Each of the nine that have taken a step is on one rank.
    assert sum(counts) == len(reference.optimizer.state) == 9
    for each in (case, reference):
        each.step(1)
    same(case, reference)


class Own(torch.optim.SGD):
    """An optimizer that looks at all gradients together."""

    def step(self, closure=None):
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def test_optimizers_that_may_look_at_several_parameters_are_refused(comm):
    for kind in (Own, torch.optim.LBFGS):
        optimizer = kind(nn.Linear(2, 3).parameters(), lr=0.1)
        raises_everywhere(
            comm,
            dc.UnsupportedOperation,
            "may use several parameters at once",
            lambda optimizer=optimizer: dc.shard_optimizer(optimizer, comm),
        )

"""Statistics of batch norm over parts of a mini-batch, and of SyncBatchNorm, against plain torch on each part."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import distconv as dc
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import close, whole

pytestmark = pytest.mark.ranks(at_most=6)

SAMPLES, ROWS, COLUMNS = 7, 13, 9
"""Not divisible by 2, 4 or 6, and but for 9 not by 3."""

GROUPS = ("spatial", "local")


class Net(nn.Module):
    """Two batch norms; ``twice`` recomputes the first part in the backward pass, as a user would."""

    def __init__(self, twice=False):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.last = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)
        self.twice = twice

    def features(self, x):
        return F.relu(self.norm(self.first(x)))

    def forward(self, x):
        y = checkpoint(self.features, x, use_reentrant=False) if self.twice else self.features(x)
        return self.last(self.second(y)).sigmoid()


class OfGroups(nn.Module):
    """``norm`` in one process: plain torch's of each group alone, then the mean of their running statistics."""

    def __init__(self, norm, boxes):
        super().__init__()
        self.norm, self.boxes = norm, boxes

    def forward(self, x):
        if not self.training:
            return self.norm(x)
        y, running, alone = torch.zeros_like(x), [0.0, 0.0], self.norm
        for rows in self.boxes:
            alone = copy.deepcopy(self.norm)
            # The same parameters, so that their gradients add up.
            alone.weight, alone.bias = self.norm.weight, self.norm.bias
            y[rows] = alone(x[rows])
            part = x[rows].numel() / x.numel()
            running = [kept + part * buffer for kept, buffer in zip(running, alone.buffers(), strict=False)]
        self.norm.running_mean.copy_(running[0])
        self.norm.running_var.copy_(running[1])
        self.norm.num_batches_tracked += 1
        return y


def boxes(grid, over):
    """Index of each group of ranks: samples, channels, rows and columns."""
    dist = dc.Distribution(grid, ("n", None, "h", "w"))
    found = [dist.box(rank, (SAMPLES, 1, ROWS, COLUMNS)) for rank in range(grid.size)]
    parts = [(box[0], *(box[2:] if over == "local" else [slice(0, ROWS), slice(0, COLUMNS)])) for box in found]
    n_h_w = dict.fromkeys(tuple((part.start, part.stop) for part in each) for each in parts)
    return [(slice(*n), slice(None), slice(*h), slice(*w)) for n, h, w in n_h_w]


def build(kind=Net, **options):
    torch.manual_seed(3)
    return kind(**options).double()


def in_groups(model, grid, over):
    for name in ("norm", "last"):
        setattr(model, name, OfGroups(getattr(model, name), boxes(grid, over)))
    return model


def trained(model, grid=None, steps=2):
    """The losses and what evaluation gives after these steps; gradients of the last one stay."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []

    def placed(t):
        return t if grid is None else dc.scatter(t, grid)

    for step in range(steps):
        optimizer.zero_grad()
        y = model(placed(normal(SAMPLES, 2, ROWS, COLUMNS, seed=step) + torch.arange(ROWS)[:, None] / 5))
        loss = F.mse_loss(y, placed(normal(SAMPLES, 4, ROWS, COLUMNS, seed=9)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, whole(model.eval()(placed(normal(SAMPLES, 2, ROWS, COLUMNS, seed=8))))


def same(model, losses, evaluated, reference, of_reference):
    expected, expected_evaluated = of_reference
    assert losses == pytest.approx(expected, rel=1e-11)
    close(evaluated, expected_evaluated, "evaluation")
    for found, parameter in zip(model.parameters(), reference.parameters(), strict=True):
        close(whole(found.grad), parameter.grad, "gradient")
    state = {name.replace("norm.norm", "norm").replace("last.norm", "last"): t
             for name, t in reference.state_dict().items()}  # fmt: skip
    found = model.state_dict()
    assert list(found) == list(state)
    for name, tensor in state.items():
        close(found[name], tensor, name)


def alike(comm, model):
    """Check that all ranks have the same state, bit for bit."""
    mine = [t.tolist() for t in model.state_dict().values()]
    assert all(theirs == mine for theirs in comm.allgather(mine))


@pytest.mark.long
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("over", GROUPS)
def test_each_group_is_normalised_as_plain_torch_does_alone(comm, over, twice):
    for grid in grids(comm, "cnhw"):
        reference = in_groups(build(twice=twice), grid, over)
        expected = trained(reference)
        model = dc.parallelize(build(twice=twice), grid, batch_norm=over)
        same(model, *trained(model, grid), reference, expected)
        alike(comm, model)


def test_a_plan_says_it_too_and_the_argument_stands_above_it(comm):
    grid = grid_over(comm, n=comm.size)
    plan = dc.Plan({"*": {"n": comm.size}}, batch_norm="local")
    for over, given in (("local", None), ("spatial", "spatial"), ("global", "global")):
        reference = build() if over == "global" else in_groups(build(), grid, over)
        expected = trained(reference)
        model = dc.parallelize(build(), plan, batch_norm=given, comm=comm)
        same(model, *trained(model, grid), reference, expected)


def test_copies_of_the_model_keep_it(comm):
    grid = grid_over(comm, h=comm.size)
    reference = in_groups(build(), grid, "local")
    expected = trained(reference)
    model = dc.parallelize(build(), grid, batch_norm="local")
    copied = copy.deepcopy(model)
    same(copied, *trained(copied, grid), reference, expected)


@pytest.mark.ranks(at_least=2)
def test_running_statistics_cost_one_message_for_all_layers(comm):
    grid = grid_over(comm, h=comm.size)
    model, x = dc.parallelize(build(), grid, batch_norm="local"), dc.scatter(normal(2, 2, ROWS, COLUMNS), grid)
    with count_traffic() as traffic:
        model(x)
    assert traffic.reduced == {("running statistics", comm.size): 2 * (6 + 4) * 8}


def test_unknown_statistics_are_refused(comm):
    grid = grid_over(comm, h=comm.size)
    match = "batch_norm='all' must be one of global, spatial, local"
    raises_everywhere(comm, dc.UnsupportedOperation, match, lambda: dc.parallelize(build(), grid, batch_norm="all"))
    raises_everywhere(comm, dc.PlanError, "batch_norm='all'", lambda: dc.Plan({"*": {"h": 1}}, batch_norm="all"))


# -- SyncBatchNorm ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("over", ["global", "local"])
def test_converted_layers_have_the_numbers_of_one_process(comm, over, after):
    reference = build()
    expected = trained(reference)
    for grid in grids(comm, "nch"):
        model = build()
        if after:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(dc.parallelize(model, grid, batch_norm=over))
        else:
            model = dc.parallelize(nn.SyncBatchNorm.convert_sync_batchnorm(model), grid, batch_norm=over)
        same(model, *trained(model, grid), reference, expected)
        alike(comm, model)


def test_a_process_group_of_torch_distributed_is_refused(comm):
    grid = grid_over(comm, n=comm.size)
    layer = nn.SyncBatchNorm(4, process_group=object()).double()
    raises_everywhere(
        comm, dc.UnsupportedOperation, "Leave it out", lambda: layer(dc.scatter(normal(2 * comm.size, 4, 5), grid))
    )

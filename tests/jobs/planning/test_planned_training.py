"""Plans of the planner train as one process does: several grids in one network, as a machine's costs make them."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.layers.models import MODELS
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import select
from tests.distconv.layouts import normal
from tests.perfmodel.networks import machine

STEPS = 2
CASES = {
    "resnet20": ({}, (4, 3, 20, 24)),
    "unet": ({"width": 4}, (2, 18, 32, 24)),
    "vgg11_bn": ({"width": 8}, (3, 3, 32, 32)),
    "lenet5": ({}, (6, 1, 28, 28)),
}


def _trained(name, target=None, comm=None):
    """Losses and final state of some steps of one process, or of ``comm`` as the plan says."""
    options, shape = CASES[name]
    torch.manual_seed(0)
    model = MODELS[name].factory(**options).double()
    grid = None
    if target is not None:
        dc.parallelize(model, target, comm=comm)
        grid = target.input_grid(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = normal(*shape, seed=step)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(x if grid is None else dc.scatter(x, grid)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.long
@pytest.mark.ranks(4)
@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("name", "bandwidth"), list(zip(CASES, (1e8, 1e9, 1e8, 1e9), strict=True)))
def test_a_planned_network_trains_as_one_process_does(comm, name, bandwidth):
    options, shape = CASES[name]
    graph = trace(MODELS[name].factory(**options), shape)
    plan = select(graph, machine(bandwidth=bandwidth, latency_s=1e-7), comm.size, seconds=1).plan
    plan = dc.Plan(comm.bcast(plan.layers), comm.size)
    losses, state = _trained(name)
    found, other = _trained(name, plan, comm)
    torch.testing.assert_close(found, losses, rtol=1e-10, atol=1e-12)
    for key, tensor in state.items():
        torch.testing.assert_close(
            other[key], tensor, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )

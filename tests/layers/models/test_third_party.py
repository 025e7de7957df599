"""Networks, losses, metrics and optimizers of other packages: over a grid they compute the same as in one process."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import distconv as dc
from tests.distconv.layouts import normal
from tests.layers.compare import whole
from tests.layers.models.third_party_functions import CALLS, OPTIMIZERS, Call, inputs
from tests.layers.models.third_party_modern import MODERN
from tests.layers.models.third_party_networks import LARGE, NETWORKS, Network, built, need, tensors

GRIDS = {2: ["c=2", "w=2"], 3: ["h=3"], 4: ["h=2,w=2", "n=2,c=2", "n=2,w=2", "c=2,h=2"]}

RELATIVE = {torch.float64: (1e-9, 1e-13), torch.float32: (1e-4, 1e-6)}
"""Per tensor relative to its largest number, plus a share of the largest number of its kind: a gradient that is zero
but for round-off (of a bias in front of a batch norm) has no digits of its own.
"""

Values = Mapping[str, Mapping[str, torch.Tensor]]


def step(model: nn.Module, x: torch.Tensor) -> Values:
    """One step of SGD and an evaluation: all that they give, whole, by kind and name."""
    torch.manual_seed(7)  # for dropout and stochastic depth
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    outputs = tensors(model.train()(x))
    loss = torch.stack([(y * normal(*y.shape, seed=i).to(y.dtype)).mean() for i, y in enumerate(outputs)]).sum()
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    tensors_of = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    state = {name: whole(tensor).clone() for name, tensor in tensors_of.items()}
    with torch.no_grad():
        evaluated = tensors(model.eval()(x))
    return {
        "outputs": {str(i): whole(y) for i, y in enumerate(outputs)},
        "gradients": gradients,
        "gradient of the input": {"x": whole(x.grad)},
        "weights": {name: t for name, t in state.items() if name in gradients},
        "buffers": {name: t.double() for name, t in state.items() if name not in gradients and not t.is_complex()},
        "evaluation": {str(i): whole(y) for i, y in enumerate(evaluated)},
    }


def check(found: Values, expected: Values, where: str) -> None:
    relative, absolute = RELATIVE[expected["outputs"]["0"].dtype]
    for kind, values in expected.items():
        assert found[kind].keys() == values.keys(), (where, kind)
        largest = max((float(v.abs().max()) for v in values.values()), default=0.0)
        for name, value in values.items():
            apart = float((found[kind][name] - value).abs().max())
            assert apart <= relative * float(value.abs().max()) + absolute * largest, (where, kind, name, apart)


def compare(comm: Any, network: Network) -> None:
    x = normal(*network.shape, seed=8).to(network.dtype)
    expected = step(built(network), x.clone().requires_grad_())
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        model = dc.parallelize(built(network), grid)
        check(step(model, dc.scatter(x, grid).requires_grad_()), expected, text)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_another_package_takes_the_step_of_one_process(comm: Any, name: str) -> None:
    compare(comm, NETWORKS[name])


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["MobileNet v3", "MONAI U-Net"])
def test_a_network_of_another_package_takes_that_step_on_other_numbers_of_ranks(comm: Any, name: str) -> None:
    compare(comm, NETWORKS[name])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_package_gives_what_it_gives_in_one_process(comm: Any, name: str, fallback: None) -> None:
    call = CALLS[name]
    need(call.package)
    known = inputs()
    dims = {key: ("n", "h", "w") if key == "labels" else ("n", "c", "h", "w")[: known[key].dim()] for key in call.takes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own, and that calls are computed as a whole
        expected = results(call, [known[key] for key in call.takes])
        for text in GRIDS[comm.size]:
            grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
            found = results(call, [dc.scatter(known[key], grid, dims=dims[key]) for key in call.takes])
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=call.tolerance, atol=call.tolerance, equal_nan=True)


def results(call: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All that is returned, whole, and the gradients of the inputs."""
    given = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    function = call.made()
    torch.manual_seed(3)
    random.seed(3)
    found = [each for each in tree_leaves(function(*given)) if isinstance(each, torch.Tensor)]
    weighted = [(y * normal(*y.shape, seed=i)).sum() for i, y in enumerate(found) if y.requires_grad]
    gradients = []
    if weighted:
        torch.stack(weighted).sum().backward()
        gradients = [whole(t.grad) for t in given if t.grad is not None]
    return [*map(whole, found), *gradients]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_another_package_steps_as_on_one_process(comm: Any, name: str, fallback: None) -> None:
    need("pytorch_optimizer")
    x, y = normal(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = stepped(name, small_network(), x, y)
        for text in GRIDS[comm.size]:
            grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
            found = stepped(name, dc.parallelize(small_network(), grid), dc.scatter(x, grid), dc.scatter(y, grid))
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10)


def small_network() -> nn.Module:
    """No bias in front of the batch norm: its gradient is zero but for rounding, and some divide by it."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)]
    body = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()]
    return nn.Sequential(*body, *head).double()


def stepped(name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state after three steps."""
    load = importlib.import_module("pytorch_optimizer").load_optimizer
    optimizer = load(name)(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {key: whole(value).clone() for key, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("name", LARGE)
def test_a_large_network_of_another_package_takes_the_step_of_one_process(comm: Any, name: str) -> None:
    compare(comm, LARGE[name])


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.time_limit(600)
@pytest.mark.usefixtures("fallback")
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODERN)
def test_a_network_that_mixes_space_otherwise_takes_the_step_of_one_process(comm: Any, name: str) -> None:
    compare(comm, MODERN[name])

"""Networks of other packages: over a grid they compute the same as in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.layouts import normal
from tests.layers.compare import whole
from tests.layers.models.third_party_networks import NETWORKS, Network, built, tensors

GRIDS = {2: ["n=2", "h=2", "c=2"], 4: ["h=2,w=2", "n=2,c=2", "n=2,w=2", "c=2,h=2"]}

RELATIVE = {torch.float64: (1e-9, 1e-13), torch.float32: (1e-4, 1e-6)}
"""Per tensor relative to its largest number, plus a share of the largest number of its kind: a gradient that is zero
but for round-off (of a bias in front of a batch norm) has no digits of its own.
"""

Values = Mapping[str, Mapping[str, torch.Tensor]]


def train(model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Take a step of SGD, and return the outputs."""
    torch.manual_seed(7)  # for dropout and stochastic depth
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    outputs = tensors(model.train()(*inputs))
    loss = torch.stack([(y * normal(*y.shape, seed=i).to(y.dtype)).mean() for i, y in enumerate(outputs)]).sum()
    loss.backward()
    optimizer.step()
    return outputs


def results(model: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Values:
    """Return the full tensors of a training step and of an evaluation, by kind and name."""
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    tensors_of = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    state = {name: whole(tensor).clone() for name, tensor in tensors_of.items()}
    with torch.no_grad():
        evaluated = tensors(model.eval()(*inputs))
    assert inputs[0].grad is not None
    return {
        "outputs": {str(i): whole(y) for i, y in enumerate(outputs)},
        "gradients": gradients,
        "gradient of the input": {"x": whole(inputs[0].grad).clone()},
        "weights": {name: t for name, t in state.items() if name in gradients},
        "buffers": {name: t.double() for name, t in state.items() if name not in gradients and not t.is_complex()},
        "evaluation": {str(i): whole(y) for i, y in enumerate(evaluated)},
    }


def step(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Values:
    """One step of SGD and an evaluation."""
    return results(model, inputs, train(model, inputs))


def check(found: Values, expected: Values, where: str) -> None:
    relative, absolute = RELATIVE[expected["outputs"]["0"].dtype]
    for kind, values in expected.items():
        assert found[kind].keys() == values.keys(), (where, kind)
        largest = max((float(v.abs().max()) for v in values.values()), default=0.0)
        for name, value in values.items():
            apart = float((found[kind][name] - value).abs().max())
            assert apart <= relative * float(value.abs().max()) + absolute * largest, (where, kind, name, apart)


def compare(comm: Any, network: Network) -> None:
    expected = step(built(network), network.inputs())
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        model = dc.parallelize(built(network), grid)
        check(step(model, network.inputs(grid)), expected, text)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_another_package_takes_the_step_of_one_process(comm: Any, name: str) -> None:
    compare(comm, NETWORKS[name])

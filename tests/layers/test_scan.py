"""Networks whose backward pass is a scan, against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.errors import UnsupportedOperation
from distconv.kernels.scan import recorded
from distconv.layers.scan import ScanSequential

METHODS = [("linear", None), ("blelloch", None), ("truncated", 1), ("auto", None)]


def small_network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Dropout(0.0),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.Tanh(),
        nn.Linear(5, 3, bias=False),
    ).double()


def gradients(model, x, target):
    x = x.detach().clone().requires_grad_(x.requires_grad)
    model.zero_grad()
    loss = F.cross_entropy(model(x), target)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *([x.grad] if x.requires_grad else [])]


def samples(count, size=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("method", "depth"), METHODS)
@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_are_autograds(method, depth, of_input, count):
    model, (x, target) = small_network(), samples(count)
    x.requires_grad_(of_input)
    scanned = ScanSequential(*model, method=method, depth=depth)
    close(gradients(scanned, x, target), gradients(model, x, target))


def test_gradients_add_up_over_passes_and_over_uses_of_a_layer():
    torch.manual_seed(0)
    shared = nn.Linear(4, 4).double()
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 3).double())
    x, target = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    expected = [2 * grad for grad in gradients(model, x, target)[1:]]
    scanned = ScanSequential(*model, method="blelloch")
    scanned.zero_grad()
    for _ in range(2):
        F.cross_entropy(scanned(x), target).backward()
    close([p.grad for p in scanned.parameters()], expected)


def test_a_frozen_layer_gets_no_gradient_and_the_others_theirs():
    model, (x, target) = small_network(), samples(2)
    expected = gradients(model, x, target)[3:]
    model[0].requires_grad_(False)
    model.zero_grad()
    scanned = ScanSequential(*model, method="blelloch")
    F.cross_entropy(scanned(x), target).backward()
    assert model[0].weight.grad is None
    close([p.grad for p in scanned.parameters() if p.requires_grad], expected)


def test_states_are_those_of_sequential():
    model = small_network()
    scanned = ScanSequential(*small_network(1))
    scanned.load_state_dict(model.state_dict())
    x, _ = samples(2)
    assert torch.equal(scanned(x), model(x))


def test_no_layer_multiplies_matrices_on_the_way_down():
    scanned, (x, target) = ScanSequential(*small_network(), method="blelloch"), samples(2)
    with recorded() as steps:
        gradients(scanned, x, target)
    assert {step.kind for step in steps if step.phase == "up-sweep"} == {"mv", "mm"}
    assert {step.kind for step in steps if step.phase != "up-sweep"} == {"mv"}


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Sigmoid(), "no rule for this layer. Supported are Conv2d"),
        (nn.Conv2d(3, 3, 3, padding_mode="reflect"), "padding must be given in numbers, and with zeros"),
        (nn.Conv2d(3, 3, 3, padding="same"), "padding must be given in numbers, and with zeros"),
        (nn.MaxPool2d(2, return_indices=True), "return_indices is not supported"),
        (nn.AvgPool2d(2, ceil_mode=True), "only means over complete windows"),
        (nn.Dropout(0.5), "use p=0"),
    ],
)
def test_layers_without_a_rule_raise_at_once(layer, reason):
    with pytest.raises(UnsupportedOperation, match=rf"layer 1, .*{reason}"):
        ScanSequential(nn.Flatten(), layer)

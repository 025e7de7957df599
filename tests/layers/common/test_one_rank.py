"""On one rank torch's own operators compute, and their results are DistTensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.layers.common.inplace_views import record_inplace_change
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import close

pytestmark = pytest.mark.ranks(1, 2)


def input_of(comm, *shape, seed=0):
    return dc.scatter(normal(*shape, seed=seed), grid_over(MPI.COMM_SELF)).requires_grad_()


def test_results_are_distributed_and_have_the_bits_of_torch(comm):
    x = input_of(comm, 2, 3, 8, 8)
    plain = normal(2, 3, 8, 8).requires_grad_()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    model.double()
    y, expected = model(x), model(plain)
    assert isinstance(y, dc.DistTensor) and y.dist == dc.Distribution(x.grid, (None, None))
    assert torch.equal(y.local, expected)
    y.square().mean().backward()
    expected.square().mean().backward()
    assert torch.equal(x.grad.local, plain.grad)


def test_a_gradient_penalty_is_that_of_torch(comm):
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()).double()
    gradients = []
    for x in (input_of(comm, 2, 3, 6, 6), normal(2, 3, 6, 6).requires_grad_()):
        layer.zero_grad()
        (slope,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
    for found, expected in zip(*gradients, strict=True):
        close(found, expected, "gradient of a gradient")


def test_what_changes_its_argument_returns_it(comm):
    x = input_of(comm, 2, 3).detach()
    assert F.relu(x, inplace=True) is x
    assert x.add_(1) is x
    assert torch.equal(x.local, normal(2, 3).relu() + 1)
    assert F.dropout(x, 0.5, training=False) is x


def test_several_results_keep_their_names(comm):
    x = input_of(comm, 4, 5)
    values, indices = torch.max(x, 1)
    assert isinstance(values, dc.DistTensor) and isinstance(indices, dc.DistTensor)
    found = torch.sort(x, 1)
    assert torch.equal(found.values.local, normal(4, 5).sort(1).values)
    assert torch.equal(found.indices.local, normal(4, 5).sort(1).indices)


COMPUTED_ON_BLOCKS = {
    "transposed": lambda x: x.transpose(1, 2),
    "of one index": lambda x: x[:, None, 1],
    "every other": lambda x: x[..., ::2],
    "parts": lambda x: x.unbind(1)[2],
    "expanded": lambda x: x[:1].expand(5, -1, -1, -1),
    "values of a view": lambda x: x.transpose(0, 1) * 2,
    "a copy": lambda x: x.transpose(1, 2).flatten(1),
    "a sum of two orders": lambda x: x.to(memory_format=torch.channels_last) + x,
}


@pytest.mark.parametrize("taken", COMPUTED_ON_BLOCKS)
def test_strides_are_those_of_torch(comm, taken):
    x, plain = input_of(comm, 2, 3, 4, 6), normal(2, 3, 4, 6)
    y, expected = COMPUTED_ON_BLOCKS[taken](x), COMPUTED_ON_BLOCKS[taken](plain)
    assert (y.stride(), y.is_contiguous()) == (expected.stride(), expected.is_contiguous())
    assert y.local.stride() == expected.stride() and torch.equal(y.local, expected)


def test_a_block_that_lies_otherwise_does_not_say_the_strides(comm):
    block = normal(3, 2, 4).transpose(0, 1)
    x = dc.DistTensor(block, dc.Distribution(grid_over(MPI.COMM_SELF), (None,) * 3), (2, 3, 4))
    for take in (lambda x: x.transpose(1, 2), lambda x: x * 2, lambda x: x[:, 1:]):
        assert take(x).stride() == take(block.contiguous()).stride()
        assert torch.equal(take(x).local, take(block))


def test_lists_of_tensors_may_mix_plain_ones(comm):
    x = input_of(comm, 2, 3)
    y = torch.cat([x, normal(1, 3, seed=1)])
    assert isinstance(y, dc.DistTensor)
    assert torch.equal(y.local, torch.cat([normal(2, 3), normal(1, 3, seed=1)]))


def test_arguments_that_torch_rejects_raise_the_operators_error(comm):
    with pytest.raises(dc.ShapeError, match="channels"):
        nn.Conv2d(4, 2, 3).double()(input_of(comm, 2, 3, 5, 5))


def test_an_operator_says_what_becomes_of_a_plain_first_argument(comm):
    number = input_of(comm).detach()
    plain = normal(5)
    assert plain.mul_(number) is plain
    with pytest.raises(dc.UnsupportedOperation, match="scatter the input first"):
        F.conv2d(normal(1, 3, 5, 5), input_of(comm, 2, 3, 3, 3))


def test_an_exception_of_a_checkpoint_passes(comm):
    x = input_of(comm, 2, 3, 6, 6)
    layer = nn.Conv2d(3, 3, 3).double()
    torch.utils.checkpoint.checkpoint(lambda t: layer(t).tanh() * 2, x, use_reentrant=False).sum().backward()
    plain = normal(2, 3, 6, 6).requires_grad_()
    (layer(plain).tanh() * 2).sum().backward()
    close(x.grad.local, plain.grad, "gradient")


def test_a_change_in_place_is_counted_once_and_what_only_looks_is_none(comm):
    x = input_of(comm, 3, 4).detach()
    record_inplace_change(x)
    before = x._memory.changes
    assert F.relu(x, inplace=True) is x and x._memory.changes == before + 1
    F.relu(x), x + 1, F.dropout(x, 0.5, training=False)
    assert x._memory.changes == before + 1

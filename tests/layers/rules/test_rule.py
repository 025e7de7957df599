"""Operators of users: values and gradients against one process on any grid, with no more traffic than the halo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.communication.transport import count_traffic
from distconv.errors import ShapeError

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

GRIDS = {1: ["n=1"], 2: ["h=2", "n=2", "c=2"], 3: ["w=3", "h=3"], 4: ["h=2,w=2", "h=4", "n=2,w=2", "c=2,h=2"]}
P = dc.Window()


def grids(comm: Any) -> list[dc.ProcessGrid]:
    return [dc.ProcessGrid(comm, **dc.parse_grid(text)) for text in GRIDS[comm.size]]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dc.rule(x={0: P, 2: dc.Window(3, stride=2, padding=(1, 2), dilation=2), 3: dc.Window(4, padding=1)}, fill=0.5)
def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight, stride=(2, 1), dilation=(2, 1))


def check_equal(comm: Any, ours: Any, plain: Any, *shapes: tuple[int, ...], placed: int = 1) -> None:
    """Values and gradients; the first ``placed`` arguments are distributed."""
    inputs = [random(*shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    expected = plain(*inputs)
    weight = random(*expected.shape, seed=9)
    (expected * weight).sum().backward()
    for grid in grids(comm):
        leaves = [dc.scatter(t.detach(), grid).requires_grad_() for t in inputs[:placed]]
        leaves += [t.detach().clone().requires_grad_() for t in inputs[placed:]]
        found = ours(*leaves)
        assert isinstance(found, dc.DistTensor) and found.shape == expected.shape
        assert (dc.gather(found) - expected).abs().max() < 1e-12
        (found * dc.scatter(weight, found.dist)).sum().backward()
        for leaf, whole in zip(leaves, inputs, strict=True):
            assert (dc.gather(leaf.grad) - whole.grad).abs().max() < 1e-12


def padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 2), value=0.5), weight, stride=(2, 1), dilation=(2, 1))


@pytest.mark.parametrize("shape", [(2, 3, 13, 11), (1, 2, 5, 4), (3, 2, 2, 2)])
def test_a_rule_of_strides_dilation_and_padding_is_torchs_convolution(comm: Any, shape: tuple[int, ...]) -> None:
    check_equal(comm, convolution, padded, shape, (4, shape[1], 3, 4))


def test_plain_tensors_compute_in_one_process(comm: Any) -> None:
    x, weight = random(2, 3, 9, 8), random(4, 3, 3, 4)
    assert torch.equal(convolution(x, weight), padded(x, weight))


@dc.rule(q={0: P, 2: P}, k={0: P, 2: dc.Window(5, padding=2)}, scale={0: P, 2: P})
def likeness(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor | None, table: torch.Tensor) -> torch.Tensor:
    """Return products with neighbours. ``scale`` has one channel; dimension 1 is needed in full, and changes."""
    found = torch.einsum("ncl,nclj->njl", q, k.unfold(2, 5, 1)) + table.view(1, 5, 1)
    return found if scale is None else found * scale


def test_arguments_with_windows_of_their_own_and_whole_dimensions(comm: Any) -> None:
    def plain(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return likeness.operator(q, F.pad(k, (2, 2)), scale, table)

    shapes = ((2, 4, 11), (2, 4, 11), (2, 1, 11), (5,))
    inputs = [random(*shape, seed=index).requires_grad_() for index, shape in enumerate(shapes)]
    expected = plain(*inputs)
    weight = random(*expected.shape, seed=9)
    (expected * weight).sum().backward()
    texts = {1: ["n=1"], 2: ["w=2", "c=2", "n=2"], 3: ["w=3"], 4: ["n=2,w=2", "c=2,w=2", "w=4"]}
    for grid in (dc.ProcessGrid(comm, **dc.parse_grid(text)) for text in texts[comm.size]):
        leaves = [dc.scatter(t.detach(), grid).requires_grad_() for t in inputs[:3]]
        leaves.append(inputs[3].detach().clone().requires_grad_())
        found = likeness(*leaves)
        assert (dc.gather(found) - expected).abs().max() < 1e-12
        (found * dc.scatter(weight, found.dist)).sum().backward()
        for leaf, whole in zip(leaves, inputs, strict=True):
            assert (dc.gather(leaf.grad) - whole.grad).abs().max() < 1e-12
        without = likeness(*leaves[:2], None, leaves[3])
        assert (dc.gather(without) - plain(inputs[0], inputs[1], None, inputs[3])).abs().max() < 1e-12


@pytest.mark.ranks(2, 3, 4)
def test_the_traffic_is_the_halo(comm: Any) -> None:
    x, grid = random(2, 3, 24, 10), dc.ProcessGrid(comm, h=comm.size)

    @dc.rule(x={0: P, 1: P, 2: dc.Window(5, padding=2), 3: dc.Window(3, padding=1)})
    def box_sum(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, (5, 3), stride=1) * 15

    leaf = dc.scatter(x, grid).requires_grad_()
    with count_traffic() as forward:
        y = box_sum(leaf)
    with count_traffic() as backward:
        y.sum().backward()
    row = 2 * 3 * 10 * 8  # bytes
    borders = 2 * (comm.size - 1)  # each is crossed both ways, by two rows
    for traffic in (forward, backward):
        assert comm.allreduce(sum(traffic.sent.values())) == borders * 2 * row
    assert not forward.reduced


def test_several_results_and_a_function_that_it_stands_for(comm: Any) -> None:
    def library(x: torch.Tensor) -> Any:
        assert torch.overrides.has_torch_function((x,))
        return torch.overrides.handle_torch_function(library, (x,), x)

    @dc.rule(x={0: P, 1: P, 2: dc.Window(3, padding=1), 3: P}, fill=-torch.inf, serves=library)
    def extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        windows = x.unfold(2, 3, 1)
        return windows.amax(-1), windows.argmax(-1)

    x = random(2, 2, 7, 5)
    expected = extremes(x)
    for grid in grids(comm):
        for found in (extremes(dc.scatter(x, grid)), library(dc.scatter(x, grid))):
            assert all(torch.equal(dc.gather(a), b) for a, b in zip(found, expected, strict=True))


def test_operands_that_do_not_fit_raise(comm: Any) -> None:
    grid = dc.ProcessGrid(comm, h=comm.size)
    x = dc.scatter(random(1, 1, 8, 6), grid)

    @dc.rule(x={0: P, 1: P, 2: dc.Window(3, padding=1), 3: P})
    def pads(x: torch.Tensor) -> torch.Tensor:
        return F.pad(F.avg_pool2d(x, (3, 1), stride=1), (0, 0, 1, 1))

    with pytest.raises(
        ShapeError, match=r"pads returns .* but its windows leave \d outputs in dimension 2. .* must not"
    ):
        pads(x)
    with pytest.raises(ShapeError, match=r"leaves 0 outputs by|leaves -1 outputs by"):
        pads(dc.scatter(random(1, 1, 8, 6)[:, :, :0], grid))
    with pytest.raises(ShapeError, match="'k' has 3 dimensions, but 'q' has 4"):
        likeness(x, dc.scatter(random(1, 1, 8), dc.ProcessGrid(comm, w=comm.size)), None, random(5))
    with pytest.raises(ShapeError, match="pads: x must be tensors"):
        pads(3)
    with pytest.raises(TypeError, match="takes x; name one of these with its windows, not 'y'"):
        dc.rule(y={0: P})(lambda x: x)

"""scatter, gather and from_local: blocks as slices, gradients as the adjoint, mistakes found on all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import distconv as dc
from distconv import placement
from distconv.communication import agreement
from tests.distconv.layouts import counting, cut, grid_over, grids, normal, raises_everywhere, twenty_layouts

SHAPES = [(7, 3), (5, 2, 9), (3, 2, 8, 7), (2, 1, 3, 4, 9)]
AXES = {2: "n", 3: "nw", 4: "nhw", 5: "ndhw"}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_slices_of_the_whole_and_gather_joins_them(comm, shape):
    whole = counting(*shape)
    for grid in grids(comm, AXES[len(shape)]):
        x = dc.scatter(whole, grid)
        assert torch.equal(x.local, cut(whole, x.dist))
        assert torch.equal(dc.gather(x), whole)
        assert x.shape == whole.shape


def test_dims_name_the_axis_of_each_dimension(comm):
    labels = counting(3, 8, 7)
    for grid in grids(comm, "nhw"):
        assert dc.scatter(labels, grid, dims="nhw").dist.axes == ("n", "h", "w")
        x = dc.scatter(labels, grid, dims=("h", None, "n"))
        assert torch.equal(x.local, cut(labels, x.dist))


def test_axes_that_the_tensor_lacks_hold_replicas(comm):
    x = dc.scatter(counting(4), grid_over(comm, h=comm.size))
    assert torch.equal(x.local, counting(4))


def test_the_adjoint_of_scatter_gathers(comm):
    for dist in twenty_layouts(comm, (5, 7, 3)):
        whole = normal(5, 7, 3).requires_grad_()
        y = normal(5, 7, 3, seed=1)
        dc.scatter(whole, dist).local.backward(cut(y, dist))
        assert torch.equal(whole.grad, y)


def test_the_adjoint_of_gather_slices(comm):
    for dist in twenty_layouts(comm, (5, 7, 3)):
        x = dc.scatter(normal(5, 7, 3), dist).requires_grad_()
        y = normal(5, 7, 3, seed=1)
        dc.gather(x).backward(y)
        assert torch.equal(x.grad.local, cut(y, dist))


def test_only_the_root_needs_the_tensor(comm):
    whole = counting(5, 2, 7, 3)
    for grid in grids(comm, "nhw"):
        for root in {0, comm.size - 1}:
            x = dc.scatter(whole if comm.rank == root else None, grid, root=root)
            assert torch.equal(x.local, cut(whole, x.dist))


def test_what_other_ranks_pass_beside_the_root_does_not_count(comm):
    x = dc.scatter(counting(4, 3) if comm.rank == 0 else torch.zeros(9), grid_over(comm, n=comm.size), root=0)
    assert torch.equal(dc.gather(x), counting(4, 3))


def test_the_gradient_of_a_scatter_from_the_root_is_whole_there(comm):
    root = comm.size - 1
    for grid in grids(comm, "nhw"):
        whole = normal(3, 2, 7, 4).requires_grad_() if comm.rank == root else None
        x = dc.scatter(whole, grid, root=root)
        assert x.requires_grad
        (x * x).sum().backward()
        if comm.rank == root:
            assert torch.equal(whole.grad, 2 * whole.detach())


@pytest.mark.parametrize("value", [torch.tensor(3.5), torch.tensor(7)])
def test_a_single_number_is_scattered_from_the_root(comm, value):
    x = dc.scatter(value if comm.rank == 0 else None, grid_over(comm, n=comm.size), root=0)
    assert x.item() == value.item()
    assert x.dtype == value.dtype


def test_a_distributed_tensor_is_scattered_anew(comm):
    x = dc.scatter(counting(7, 3, 5, 4), grid_over(comm, n=comm.size))
    y = dc.scatter(x, grid_over(comm, h=comm.size))
    assert torch.equal(y.local, cut(counting(7, 3, 5, 4), y.dist))


@pytest.mark.parametrize("axes", [("n", None), (None, None)])
def test_changing_the_block_leaves_the_scattered_tensor_as_it_was(comm, axes):
    whole = counting(8, 3)
    x = dc.scatter(whole, dc.Distribution(grid_over(comm, n=comm.size), axes))
    x.requires_grad_().data.add_(1)
    assert torch.equal(whole, counting(8, 3))
    assert not whole.requires_grad
    assert torch.equal(dc.gather(x).detach(), counting(8, 3) + 1)


def test_gather_of_a_plain_tensor_is_that_tensor(comm):
    plain = counting(3)
    assert dc.gather(plain) is plain


def test_a_tensor_without_memory_is_rejected(comm):
    given, grid = counting(4, 3).to("meta"), grid_over(comm, n=comm.size)
    dist = dc.Distribution(grid, (None, None))
    for call, name in (
        (lambda: dc.scatter(given, grid), "scatter"),
        (lambda: dc.scatter(given, grid, root=0), "scatter"),
        (lambda: dc.from_local(given, dist, (4, 3)), "from_local"),
    ):
        raises_everywhere(comm, dc.DistributionError, f"{name}: a tensor on the device meta has no values", call)


@pytest.mark.parametrize(
    ("tensor", "options", "match"),
    [
        (None, {}, "needs a torch.Tensor on every rank, or root="),
        ([1.0], {}, "needs a torch.Tensor"),
        (counting(3, 2), {"dims": "n"}, "names 1 dimensions but the tensor has 2"),
        (counting(3, 2), {"dims": "nn"}, "can split one dimension only"),
        (counting(1, 1, 1, 1, 1, 1), {}, "no default distribution. Pass dims="),
        (None, {"root": 0}, "rank 0 is the root and must pass a tensor"),
        (counting(4), {"root": -1}, r"root=-1 is not one of the \d ranks"),
        (counting(4), {"root": 99}, r"root=99 is not one of the \d ranks"),
        (counting(4), {"grid": "n=1"}, "needs a ProcessGrid or a Distribution"),
    ],
)
def test_what_cannot_be_scattered_is_refused(comm, tensor, options, match):
    named = {"grid": grid_over(comm, n=comm.size), **options}
    raises_everywhere(comm, dc.DistributionError, match, lambda: dc.scatter(tensor, named.pop("grid"), **named))


def test_blocks_become_a_tensor(comm):
    for dist in twenty_layouts(comm, (5, 7, 3)):
        whole = counting(5, 7, 3)
        x = dc.from_local(cut(whole, dist), dist, (5, 7, 3))
        assert torch.equal(dc.gather(x), whole)


STRIDED = {
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "every second": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "inside a larger one": lambda x: torch.nn.functional.pad(x, [1] * 8)[1:-1, 1:-1, 1:-1, 1:-1],
}


@pytest.mark.fault(19)
@pytest.mark.parametrize("kind", STRIDED)
def test_memory_layout_changes_no_bit(comm, kind):
    whole = normal(3, 4, 7, 8)
    given = STRIDED[kind](whole)
    assert torch.equal(given, whole)
    assert not given.is_contiguous()
    for grid in grids(comm, "nhw"):
        x = dc.scatter(given, grid)
        assert torch.equal(x.local, cut(whole, x.dist))
        assert torch.equal(dc.from_local(STRIDED["every second"](x.local), x.dist, whole.shape).gather(), whole)


@pytest.mark.ranks(at_least=2)
def test_changing_what_was_redistributed_changes_the_source_nowhere(comm):
    grid = grid_over(comm, n=comm.size)
    x = dc.scatter(normal(1, 3), grid)
    y = x.redistribute(dc.Distribution(grid, (None, None)))
    y.local.add_(1)
    assert torch.equal(dc.gather(x), normal(1, 3))


@pytest.mark.ranks(at_least=2)
def test_placements_of_a_dtensor_replicate_or_raise(comm):
    from torch.distributed.tensor import Replicate, Shard

    grid = grid_over(comm, n=comm.size)
    x = dc.scatter(normal(5, 3), grid).requires_grad_()
    y = x.redistribute(placements=[Replicate()])
    assert y.dist == x.dist.replicate()
    (y * normal(5, 3, seed=1)).sum().backward()
    assert torch.equal(dc.gather(x.grad), normal(5, 3, seed=1))
    for arguments in ({"placements": [Shard(0)]}, {}, {"target": grid, "placements": [Replicate()]}):
        raises_everywhere(
            comm,
            dc.UnsupportedOperation,
            r"redistribute: no distribution .*Pass a Distribution",
            partial(x.redistribute, **arguments),
        )


DIFFERENT = {
    "images": lambda rank: normal(3, 2, 8, 8, seed=rank),
    "labels": lambda rank: torch.arange(12).roll(rank),
    "truth values": lambda rank: torch.arange(12) % (2 + rank) == 0,
    "complex numbers": lambda rank: torch.complex(normal(4, 3), normal(4, 3, seed=rank)).conj(),
    "one value of a permuted tensor": lambda rank: (normal(4, 3, 5) + (normal(4, 3, 5) > 1) * rank).permute(2, 0, 1),
}


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_batch_of_its_own_on_each_rank_is_refused(comm, kind):
    tensor = DIFFERENT[kind](comm.rank)
    with dc.ProcessGrid(comm, n=comm.size) as grid:
        raises_everywhere(
            comm, dc.MismatchError, r"values .*the same seed on all ranks.*root=0", lambda: dc.scatter(tensor, grid)
        )


@pytest.mark.ranks(at_least=2)
def test_values_are_compared_at_first_and_every_so_often(comm):
    same, different = torch.full((4, 3), torch.nan), normal(4, 3, seed=comm.rank)
    with dc.ProcessGrid(comm, n=comm.size) as grid:
        for _ in range(5):
            dc.scatter(same, grid)
        for _ in range(2):
            dc.scatter(different, grid)
        raises_everywhere(comm, dc.MismatchError, "values", lambda: dc.scatter(different, grid))


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(("level", "compared"), [("off", 0), ("plan", 9), ("all", 40)])
def test_how_often_values_are_compared_is_the_users_choice(comm, monkeypatch, level, compared):
    monkeypatch.setattr(agreement, "level", level)
    digests, digest = [], placement.digest
    monkeypatch.setattr(placement, "digest", lambda tensor: digests.append(tensor) or digest(tensor))
    with dc.ProcessGrid(comm, n=comm.size) as grid:
        for _ in range(40):
            dc.scatter(normal(4, 3), grid)
    assert len(digests) == compared


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(12).view(4, 3)[1:2, 1], torch.tensor(3.0), torch.empty(0, 3), torch.ones(2, 3).bfloat16().t()],
)
def test_tensors_of_any_strides_and_sizes_are_scattered(comm, tensor):
    with dc.ProcessGrid(comm, n=comm.size) as grid:
        assert torch.equal(dc.gather(dc.scatter(tensor, grid)), tensor)


class _Named(torch.Tensor):
    """A subclass with functions of its own, such as MONAI's MetaTensor."""


def test_of_a_subclass_the_values_are_scattered(comm):
    x = dc.scatter(normal(5, 3, 8, 6).as_subclass(_Named), grid_over(comm, h=comm.size))
    assert type(x.local) is torch.Tensor
    assert type(dc.gather(torch.nn.functional.max_pool2d(x, 2))) is torch.Tensor


def test_a_scattered_tensor_has_the_order_of_memory_of_the_whole(comm):
    x = normal(3, 4, 7, 5)
    for given in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(0, 3)):
        assert dc.scatter(given, grid_over(comm, h=comm.size)).stride() == given.stride()

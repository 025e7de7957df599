"""DistTensor as torch code meets it: attributes, in-place changes, gradients, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

import distconv as dc
from tests.distconv.layouts import counting, cut, grid_over, grids, normal, raises_everywhere


def scattered(comm, *shape, axis="h"):
    return dc.scatter(normal(*shape), grid_over(comm, **{axis: comm.size}))


@pytest.mark.cpu
def test_it_looks_like_the_global_tensor(comm):
    x = scattered(comm, 3, 2, 7, 4)
    assert isinstance(x, torch.Tensor)
    assert x.shape == x.size() == torch.Size([3, 2, 7, 4])
    assert (x.ndim, x.dim(), len(x), x.numel(), x.nelement(), x.size(2), x.size(-1)) == (4, 4, 3, 168, 168, 7, 4)
    assert x.dtype == torch.float64
    assert x.device.type == "cpu"
    assert x.is_floating_point()
    assert not x.is_cuda
    assert x.element_size() == 8


def test_its_block_is_one_stable_object(comm):
    x = scattered(comm, 3, 2, 7, 4)
    assert x.local is x.local
    assert x.local.shape == x.dist.local_shape(x.shape)
    assert x.box() == x.dist.box(None, x.shape)
    assert x.grid is x.dist.grid


def test_it_prints_its_shape_and_its_distribution(comm):
    x = scattered(comm, 3, 2, 7, 4)
    first = x.box()[0]
    assert repr(x).startswith("DistTensor(shape=(3, 2, 7, 4), dtype=torch.float64, Distribution((n, c, h, w) over")
    assert f"of which here [{first.start}:{first.stop}, " in repr(x)


def test_a_loss_prints_its_value_on_one_rank_alone(comm):
    x = scattered(comm, 3, 2, 7, 4)
    loss = x.square().mean()
    value = dc.gather(x).square().mean().item()
    if comm.rank == comm.size - 1:
        assert repr(loss).startswith(f"DistTensor({loss.local.item()}, shape=(), dtype=torch.float64")
        assert float(f"{loss}") == pytest.approx(value)
        assert f"{loss:.3f}" == f"{value:.3f}"


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.linalg.tensorinv(x), "linalg.tensorinv"),
        (lambda x: x.renorm(2, 0, 1.0), "renorm"),
        (lambda x: torch.linalg.lstsq(x, x), "linalg.lstsq"),
        (lambda x: torch.cov(x[0, 0]), "cov"),
    ],
)
def test_a_function_without_a_rule_raises_and_says_the_way_out(comm, function, name):
    x = scattered(comm, 3, 2, 7, 4)
    text = raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: function(x))
    assert name in text


@pytest.mark.parametrize("kind", [NotImplementedError, dc.DistconvError])
def test_a_refusal_is_what_a_caller_would_expect(comm, kind):
    x = scattered(comm, 3, 2, 7, 4)
    with pytest.raises(kind):
        torch.renorm(x, 2, 0, 1.0)


def test_the_distance_of_two_tensors_is_a_function_and_no_method(comm):
    x = scattered(comm, 3, 2, 7, 4)
    y = x * 2
    torch.testing.assert_close(torch.dist(x, y).item(), torch.dist(dc.gather(x), dc.gather(y)).item())
    raises_everywhere(comm, dc.UnsupportedOperation, r"Call torch\.dist\(x, y\)", lambda: x.dist(y))


@pytest.mark.fault(12)
def test_below_the_function_interface_it_raises(comm):
    x = scattered(comm, 3, 2, 7, 4)
    raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: torch.ops.aten.relu(x))
    with torch._C.DisableTorchFunctionSubclass():
        raises_everywhere(comm, dc.UnsupportedOperation, "below torch's function interface", lambda: torch.relu(x))


@pytest.mark.ranks(at_least=2)
def test_it_cannot_be_pickled_or_made_an_array(comm):
    x = scattered(comm, 2, 2, 4, 4)
    raises_everywhere(comm, dc.UnsupportedOperation, "Save the result of gather", lambda: pickle.dumps(x))
    raises_everywhere(comm, dc.UnsupportedOperation, "gather", lambda: x.numpy())


def test_what_is_whole_everywhere_goes_to_numpy_and_into_a_tensor_of_its_own(comm):
    loss = dc.scatter(normal(4, 6), grid_over(comm, n=comm.size)).sum().requires_grad_()
    expected = normal(4, 6).sum()
    assert np.allclose(loss.detach().cpu().numpy(), expected) and np.allclose(np.asarray(loss.detach()), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: a tensor made of a tensor
        copied = torch.tensor(loss)
    assert type(copied) is torch.Tensor and not copied.requires_grad
    torch.testing.assert_close(copied, expected)


def test_a_deep_copy_has_memory_of_its_own(comm):
    x = scattered(comm, 3, 2, 7, 4)
    twin = copy.deepcopy(x)
    twin.add_(1)
    assert torch.equal(dc.gather(x), normal(3, 2, 7, 4))
    assert torch.equal(dc.gather(twin), normal(3, 2, 7, 4) + 1)
    assert twin.dist == x.dist


def test_a_shallow_copy_shares_the_memory(comm):
    x = scattered(comm, 3, 2, 7, 4).requires_grad_()
    for given in (x, x * 1):
        twin = copy.copy(given)
        assert twin is not given
        assert twin.is_leaf
        assert twin.requires_grad
        with torch.no_grad():
            twin.add_(1)
        assert torch.equal(dc.gather(given), normal(3, 2, 7, 4) + 1)
        with torch.no_grad():
            twin.sub_(1)


def test_a_deep_copy_of_a_tensor_has_a_gradient_of_its_own(comm):
    x = scattered(comm, 3, 2, 7, 4).requires_grad_()
    (x * 2).sum().backward()
    both = copy.deepcopy({"a": x, "b": [x]})
    assert both["b"][0] is both["a"] and both["a"].requires_grad
    x.grad.zero_()
    assert torch.equal(dc.gather(both["a"].grad), torch.full_like(normal(3, 2, 7, 4), 2))


def test_in_place_operators_change_the_same_tensor(comm):
    x = scattered(comm, 3, 2, 7, 4)
    same, local = x, x.local
    x += 1
    x.mul_(2)
    x.relu_()
    assert x is same
    assert x.local is local
    assert torch.equal(dc.gather(x), ((normal(3, 2, 7, 4) + 1) * 2).relu())


def test_an_in_place_change_through_another_layout_reaches_its_target(comm):
    x = scattered(comm, 3, 2, 7, 4)
    x += dc.scatter(counting(3, 2, 7, 4), grid_over(comm, w=comm.size))
    x -= counting(7, 1)
    assert torch.equal(dc.gather(x), normal(3, 2, 7, 4) + counting(3, 2, 7, 4) - counting(7, 1))


def test_single_values_are_the_same_on_every_rank(comm):
    total = scattered(comm, 3, 2, 7, 4).sum()
    expected = normal(3, 2, 7, 4).sum().item()
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert float(total) == total.item() == total.tolist()
    assert f"{total:.3f}" == f"{expected:.3f}"
    assert bool(total > expected - 1)
    assert int(total) == int(expected)
    assert len(set(comm.allgather(total.item()))) == 1


def test_the_item_of_a_split_tensor_of_one_element_is_known_everywhere(comm):
    x = dc.scatter(torch.full((1, 1), 7.5), grid_over(comm, n=comm.size))
    assert x.item() == 7.5


CONVERSIONS = {
    **{kind.__name__: kind for kind in (bool, float, int, complex)},
    **{"item": lambda x: x.item(), "index": lambda x: [0][x], "if": lambda x: 1 if x else 2},
    **{"row out of range": lambda x: x[7], "dimension": lambda x: x.sum(5)},
    "backward of several elements": lambda x: (x.requires_grad_() * 2).backward(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_errors_of_conversions_are_those_of_torch(comm, name):
    """Callers catch them by their class: ``except RuntimeError``."""
    plain = normal(3, 2)
    with pytest.raises(Exception) as expected:
        CONVERSIONS[name](plain)
    with pytest.raises(type(expected.value)) as raised:
        CONVERSIONS[name](dc.scatter(plain, grid_over(comm, n=comm.size)))
    assert isinstance(raised.value, dc.DistconvError) or type(raised.value) is type(expected.value)


def test_backward_takes_a_whole_or_a_distributed_gradient(comm):
    gradient = normal(3, 2, 7, 4, seed=1)
    for grid in grids(comm, "nhw"):
        for given in (gradient, dc.scatter(gradient, grid), dc.scatter(gradient, grid_over(comm, n=comm.size))):
            x = dc.scatter(normal(3, 2, 7, 4), grid).requires_grad_()
            (x * 3).backward(given)
            assert torch.equal(dc.gather(x.grad), gradient * 3)


def test_gradients_accumulate_and_can_be_cleared(comm):
    x = scattered(comm, 3, 2, 7, 4).requires_grad_()
    x.sum().backward()
    (2 * x).sum().backward()
    assert torch.equal(dc.gather(x.grad), torch.full((3, 2, 7, 4), 3.0).double())
    x.grad = None
    assert x.grad is None


def test_an_assigned_gradient_is_brought_to_the_layout_of_its_tensor(comm):
    x = scattered(comm, 3, 2, 7, 4).requires_grad_()
    x.grad = dc.scatter(counting(3, 2, 7, 4), grid_over(comm, n=comm.size))
    assert torch.equal(x.local.grad, cut(counting(3, 2, 7, 4), x.dist))


def test_requires_grad_and_the_graph_are_those_of_the_block(comm):
    x = scattered(comm, 3, 2, 7, 4)
    assert not x.requires_grad
    x.requires_grad = True
    y = x * 2
    assert x.is_leaf
    assert y.requires_grad
    assert y.grad_fn is not None
    assert not y.is_leaf
    assert not y.detach().requires_grad
    with torch.no_grad():
        assert not (x * 2).requires_grad


def test_it_can_be_put_on_the_memory_of_another_of_its_shape(comm):
    x, other = scattered(comm, 3, 2, 7, 4), scattered(comm, 3, 2, 7, 4) * 2
    assert x.set_(other) is x
    other.add_(1)
    assert torch.equal(dc.gather(x), normal(3, 2, 7, 4) * 2 + 1)
    raises_everywhere(comm, dc.UnsupportedOperation, "cannot become", lambda: x.set_(other[1:]))


def test_a_retained_gradient_is_there(comm):
    x = scattered(comm, 3, 2, 7, 4).requires_grad_()
    y = x * 2
    y.retain_grad()
    (y * y).sum().backward()
    assert torch.allclose(dc.gather(y.grad), 4 * normal(3, 2, 7, 4), rtol=1e-14)


def test_redistribution_to_a_grid_keeps_the_axes(comm):
    x = scattered(comm, 4, 2, 7, 9)
    y = x.redistribute(grid_over(comm, w=comm.size))
    assert y.dist.axes == x.dist.axes
    assert torch.equal(y.local, cut(normal(4, 2, 7, 9), y.dist))
    assert x.redistribute(x.dist) is x


def test_replication_makes_the_chosen_dimensions_whole(comm):
    for grid in grids(comm, "nhw"):
        x = dc.scatter(normal(4, 2, 7, 9), grid)
        assert torch.equal(x.replicated().local, normal(4, 2, 7, 9))
        assert x.replicated([2]).local.shape[2] == 7


def test_it_may_be_empty_on_some_ranks_and_still_works(comm):
    whole = normal(1, 2, 2, 1)
    for grid in grids(comm, "nhw"):
        x = dc.scatter(whole, grid).requires_grad_()
        (x * x).sum().backward()
        assert x.grad.local.shape == x.local.shape
        assert torch.equal(dc.gather(x.grad), 2 * whole)


def test_a_loss_is_pickled_as_a_plain_tensor_and_other_tensors_are_not(comm):
    x = dc.scatter(counting(4, 3), grid_over(comm, h=comm.size), dims="h-").requires_grad_()
    loaded = pickle.loads(pickle.dumps((x * x).sum()))
    assert type(loaded) is torch.Tensor and not loaded.requires_grad and loaded.item() == 650
    for tensor in (x, x.sum((0, 1), keepdim=True), x[0, 0]):
        if tensor.dim() or tensor._view is not None:
            with pytest.raises(dc.UnsupportedOperation, match="cannot be pickled"):
                pickle.dumps(tensor)

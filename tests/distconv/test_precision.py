"""Precision: results over ranks are float64's, rounded once; and what is converted is rounded once, or exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication.digest import checksum, digest
from distconv.writing import open_output
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import whole

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SHAPE = (3, 6, 7, 9)
WEIGHT, FILTERS = normal(6, seed=1).exp(), normal(4, 6, 3, 3, seed=2)


def of(function: Callable[..., Any], *plain: torch.Tensor) -> Callable[[Any], Any]:
    """``function(x, *plain)``, plain tensors in the dtype of x, with values that all dtypes have."""
    return lambda x: function(x, *(t.bfloat16().to(x.dtype) for t in plain))


def normalized(make: Callable[[], nn.Module]) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        layer = make()
        with torch.no_grad():
            layer.weight.copy_(WEIGHT[: len(layer.weight)].bfloat16())
        return layer.to(x.dtype)(x)

    return call


ONCE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum((1, 2, 3)),
    "mean": torch.mean,
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 2": torch.norm,
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, (1, 2, 3)),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, 1),
    "norm -1": lambda x: torch.linalg.vector_norm(x, -1, (2, 3)),
    "Frobenius norm": lambda x: torch.linalg.matrix_norm(x),
    "std": torch.std,
    "var": lambda x: x.var((1, 2), correction=0),
    "logsumexp": lambda x: x.logsumexp((1, 2)),
    "softmax": lambda x: x.softmax(1),
    "softmax of rows": lambda x: x.softmax(2),
    "log_softmax": lambda x: x.log_softmax(3),
    "batch norm": normalized(lambda: nn.BatchNorm2d(6)),
    "batch norm in evaluation": of(lambda x, m, v: F.batch_norm(x, m, v), WEIGHT * 3, WEIGHT),
    "instance norm": normalized(lambda: nn.InstanceNorm2d(6, affine=True)),
    "group norm": normalized(lambda: nn.GroupNorm(2, 6)),
    "layer norm": lambda x: F.layer_norm(x, (7, 9)),
    "layer norm of channels": lambda x: F.layer_norm(x, (6, 7, 9)),
    "average pooling": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "adaptive pooling": lambda x: F.adaptive_avg_pool2d(x, 1),
    "convolution": of(lambda x, w: F.conv2d(x, w, padding=1), FILTERS),
    "transposed convolution": of(lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1)), FILTERS),
    "linear": of(lambda x, w: F.linear(x, w), normal(4, 9)),
    "product": of(lambda x, w: torch.einsum("nchw,kc->nkhw", x, w), normal(4, 6)),
    "bilinear": lambda x: F.interpolate(x, size=(5, 4), mode="bilinear"),
    "squared error": of(F.mse_loss, normal(*SHAPE, seed=3)),
    "absolute error": of(F.l1_loss, normal(*SHAPE, seed=3)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(3 * 63).view(3, 7, 9) % 6),
    "cross entropy of labels that are smoothed": lambda x: F.cross_entropy(
        x, torch.arange(3 * 63).view(3, 7, 9) % 6, label_smoothing=0.1
    ),
    "binary cross entropy": of(F.binary_cross_entropy_with_logits, normal(*SHAPE, seed=3).sigmoid()),
}


OF_PRODUCTS = ("convolution", "transposed convolution", "linear", "product")
"""Operators whose partial sums are rounded on each rank by torch's kernel, before ranks add them."""


def bound(exact: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """How far a result may be from ``exact``: by one rounding, or as far as torch's ``own`` in one process.

    float32 is summed in another order.
    """
    size = exact.abs() / 2 + 0.01 * exact.abs().max() if own.dtype != torch.float32 else 8 * exact.abs().max()
    return torch.maximum(torch.finfo(own.dtype).eps * size, 1.1 * (own.double() - exact).abs().max())


def with_gradient(function: Callable[[Any], Any], x: Any) -> tuple[torch.Tensor, ...]:
    """The result, and the gradient of x, if it has one, for a gradient of the result whose values all dtypes have."""
    x = x.detach().requires_grad_()
    y = function(x)
    if function in (ONCE["norm 0"], ONCE["norm -1"]):
        return (whole(y),)
    gradient = normal(*y.shape, seed=4).bfloat16().to(y.dtype)
    given = dc.scatter(gradient, y.dist) if isinstance(y, dc.DistTensor) else gradient
    return whole(y), whole(torch.autograd.grad(y, x, given)[0])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ONCE)
def test_results_and_gradients_are_rounded_once(comm: Any, name: str) -> None:
    roundings = 1 + 2 * (name in OF_PRODUCTS)
    for dtype in FLOATS:
        x = (normal(*SHAPE) + 1).to(dtype)
        exact, own = with_gradient(ONCE[name], x.double()), with_gradient(ONCE[name], x)
        for axis in "nch":
            split = with_gradient(ONCE[name], dc.scatter(x, grid_over(comm, **{axis: comm.size})))
            for what, found, alone, wanted in zip(("y", "dx"), split, own, exact, strict=False):
                assert found.dtype == dtype
                off = (found.double() - wanted).abs() - (roundings + (what == "dx")) * bound(wanted, alone)
                assert (off <= 0).all(), f"{what} in {dtype} over {axis}: {off.max()} too far of {wanted.abs().max()}"


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [nn.BatchNorm2d, lambda n: nn.InstanceNorm2d(n, track_running_stats=True)])
def test_running_statistics_are_of_values_far_from_zero(comm: Any, make: Any, dtype: torch.dtype) -> None:
    x = (normal(*SHAPE) + 30).to(dtype)
    exact, found = make(6).double(), make(6)
    exact(x.double())
    with torch.autocast("cpu", dtype) if dtype != torch.float32 else torch.enable_grad():
        dc.parallelize(found, grid_over(comm, h=comm.size))(dc.scatter(x, grid_over(comm, h=comm.size)))
    torch.testing.assert_close(found.running_mean.double(), exact.running_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.running_var.double(), exact.running_var, rtol=2e-5, atol=0)


# -- what keeps its values ------------------------------------------------------------------------------------------


VALUES: dict[torch.dtype, list[Any]] = {
    torch.bool: [True, False, True],
    torch.uint8: [0, 200, 255],
    torch.int8: [-128, 0, 127],
    torch.int16: [-(2**15), 0, 2**15 - 1],
    torch.int32: [-(2**31), 0, 2**31 - 1],
    torch.int64: [-(2**63), 2**53 + 1, 2**63 - 1],
    torch.float16: [6e-8, -65504.0, float("inf")],
    torch.bfloat16: [1e-38, -3e38, float("-inf")],
    torch.float32: [1e-45, -0.0, 1 / 3],
    torch.float64: [5e-324, -0.0, 1 / 3],
    torch.complex64: [1 + 2j, -1 / 3j, 1e-45],
    torch.complex128: [1 + 2j, -1 / 3j, 5e-324],
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_values_of_every_dtype_are_moved_bit_for_bit(comm: Any, shared_tmp_path: Any, dtype: torch.dtype) -> None:
    x = torch.tensor(VALUES[dtype] * 5, dtype=dtype).view(5, 3)
    grid = grid_over(comm, n=comm.size)
    given = dc.scatter(x, grid)
    moved = [dc.gather(y) for y in (given, given.redistribute(given.dist.replicate()), dc.scatter(x, grid, root=0))]
    assert all(bits(y) == bits(x) for y in moved)
    model = nn.Module()
    model.register_buffer("x", x.clone())
    dc.save_checkpoint(shared_tmp_path, 1, model, comm=comm)
    model.x.zero_()
    dc.load_checkpoint(shared_tmp_path, model, comm=comm)
    assert bits(model.x) == bits(x)
    wrong = x.clone()
    wrong[-1, 0] = x[0, 1]
    assert digest(wrong) != digest(x) and checksum(wrong) != checksum(x)
    if dtype.is_complex:
        return
    dc.write(given, shared_tmp_path / "x.zarr", "x")
    stored = dc.gather(dc.scatter(torch.from_numpy(read(shared_tmp_path / "x.zarr")), grid))
    assert bits(stored.to(dtype)) == bits(x)


def bits(tensor: torch.Tensor) -> bytes:
    assert not isinstance(tensor, dc.DistTensor)
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() + str(tensor.dtype).encode()


def read(path: Any) -> Any:
    import zarr

    return np.asarray(zarr.open_group(path, mode="r")["x"])


OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


class Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_state_of_an_optimizer_gets_the_dtype_of_its_parameter_and_counts_stay_as_they_are(
    tmp_path: Any, dtype: torch.dtype, name: str
) -> None:
    first, second = Scaled(torch.float32), Scaled(dtype)
    optimizer, other = OPTIMIZERS[name](first.parameters()), OPTIMIZERS[name](second.parameters())
    for step in range(2):
        for number, parameter in enumerate(first.parameters()):
            parameter.grad = normal(*parameter.shape, seed=step + number).float()
        optimizer.step()
    for state in optimizer.state.values():
        state["step" if "step" in state else "momentum_buffer"].add_(3000 if "step" in state else 0)
    dc.save_checkpoint(tmp_path, 1, first, optimizer)
    dc.load_checkpoint(tmp_path, second, other, convert_dtype=True)
    for old, new in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(new, old.to(dtype))
        assert optimizer.state[old].keys() == other.state[new].keys()
        for key, saved in optimizer.state[old].items():
            found = other.state[new][key]
            if isinstance(saved, torch.Tensor):
                follows = saved.shape == old.shape and key not in ("step", "mu_product", "eta", "mu")
                assert torch.equal(found, saved.to(dtype) if follows else saved), key
                assert found.dtype == (dtype if follows else saved.dtype), key
    for parameter in second.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()


@pytest.mark.ranks(2)
def test_what_no_file_of_samples_holds_is_rejected(comm: Any, shared_tmp_path: Any) -> None:
    for dtype in (torch.complex64, torch.complex128, torch.float8_e5m2):
        raises_everywhere(
            comm,
            dc.DataError,
            f"values of {dtype} cannot be read as samples",
            lambda dtype=dtype: open_output(shared_tmp_path / "o.zarr", "x", (3,), dtype, comm, note={}),
        )

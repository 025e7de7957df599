"""Sparse convolution against torch's dense one and against brute force, on random clouds."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.layers.sparse import SparseConv, SparseMaxPool, SparseTensor
from tests.layers.sparse.clouds import brute_force, dense_convolution, normal, random_cloud, rng_of

KINDS = ("submanifold", "wider", "strided", "back to finer", "generative")
CASES = 12
"""Random clouds and layers of each kind."""


def random_layer(rng, kind, dimension, *, boxes=False):
    """A layer of a kind: any kernel size, or any offsets."""
    kernel = tuple(rng.randint(1, 4 if dimension < 3 else 3) for _ in range(dimension))
    choice = list(itertools.product(range(-2, 3), repeat=dimension))
    offsets = None if boxes or rng.random() < 0.6 else rng.sample(choice, rng.randint(1, 4))
    return SparseConv(
        rng.randint(1, 3),
        rng.randint(1, 3),
        kernel if offsets is None else None,
        1 if kind in ("submanifold", "wider") else rng.randint(2, 3),
        dimension,
        submanifold=kind == "submanifold",
        transposed=kind in ("back to finer", "generative"),
        offsets=offsets,
        dilation=rng.choice((1, 1, 2)),
        bias=rng.random() < 0.7,
    ).double()


def random_input(rng, kind, layer):
    """A cloud for the layer, with empty samples, sometimes without any site."""
    sites = 0 if rng.random() < 0.05 else 14
    stride = layer.stride if kind == "generative" else rng.choice((1, 1, 2))
    x = random_cloud(rng, layer.dimension, layer.in_channels, stride=stride, sites=sites)
    if kind == "back to finer":
        x = SparseMaxPool(layer.stride, dimension=layer.dimension)(x)
        x = x.replace(x.features.detach().requires_grad_())
    return x


def box_of(layer):
    """The offsets of a box of the weight's extents."""
    return tuple(itertools.product(*(range(-((k - 1) // 2), k // 2 + 1) for k in layer.weight.shape[2:])))


def expected_sites(kind, x, layer):
    """As sets of rows, from the definition."""
    rows = x.coords.tolist()
    if kind == "submanifold":
        return {tuple(row) for row in rows}
    if kind == "strided":
        size = x.stride * layer.stride
        return {(b, *(c // size * size for c in u)) for b, *u in rows}
    if kind == "back to finer":
        return {tuple(row) for row in x.sites.finer.coords.tolist()}
    unit = layer.dilation * (x.stride // layer.stride)
    sign = 1 if layer.transposed else -1
    return {
        (b, *(c + sign * unit * o for c, o in zip(u, offset, strict=True)))
        for b, *u in rows
        for offset in layer.offsets
    }


def compare(x, layer, reference, out):
    wanted = [x.features, *layer.parameters()]
    expected = reference(x, layer, out)
    direction = normal(*out.shape, seed=1)
    ours = torch.autograd.grad(out.features, wanted, direction)
    theirs = torch.autograd.grad(expected, wanted, direction, allow_unused=True)
    torch.testing.assert_close(out.features, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("kind", KINDS)
def test_convolution_and_all_gradients_equal_dense_convolution_at_the_active_sites(kind, case):
    rng = rng_of(kind, case)
    layer = random_layer(rng, kind, 1 + case % 4)
    x = random_input(rng, kind, layer)
    out = layer(x)
    assert {tuple(row) for row in out.coords.tolist()} == expected_sites(kind, x, layer)
    assert out.batch_size == x.batch_size
    is_box = layer.dimension < 4 and layer.offsets == box_of(layer)
    compare(x, layer, dense_convolution if is_box else brute_force, out)


@pytest.mark.parametrize(("dimension", "dense"), [(1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)])
def test_state_dictionaries_are_those_of_torchs_convolutions(dimension, dense):
    ours, theirs = SparseConv(3, 4, 3, dimension=dimension).double(), dense(3, 4, 3, padding=1).double()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = random_cloud(rng_of("state", dimension), dimension, 3)
    torch.testing.assert_close(ours(x).features, dense_convolution(x, ours, x), rtol=1e-10, atol=1e-10)
    assert torch.equal(ours.weight, theirs.weight)


def test_each_offset_has_a_matrix_that_is_contiguous_and_stays_so():
    layer = SparseConv(5, 7, 3)
    layer.load_state_dict(nn.Conv3d(5, 7, 3).state_dict())
    layer.double()
    layer(random_cloud(rng_of(0), 3, 5)).features.sum().backward()
    torch.optim.Adam(layer.parameters()).step()
    assert layer.matrices.is_contiguous() and layer.matrices.shape == (27, 5, 7)
    assert layer.weight.grad.stride() == layer.weight.stride()
    assert torch.equal(layer.matrices[5], layer.weight[:, :, 0, 1, 2].t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_result_has_the_low_dtype_and_gradients_the_high_one(dtype):
    x = random_cloud(rng_of("autocast"), 3, 4, sites=200, dtype=torch.float32)
    layer = SparseConv(4, 4, 3)
    exact = layer(x)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.features.float(), exact.features, rtol=0.02, atol=0.02)
    out.features.sum().backward()
    theirs = torch.autograd.grad(exact.features.sum(), [x.features, *layer.parameters()])
    for a, b in zip((x.features.grad, layer.weight.grad, layer.bias.grad), theirs, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03 * float(b.abs().max()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "back to finer"]
)  # moved tensors have no finer sites
def test_a_gpu_gives_the_same(kind):
    rng = rng_of("gpu", kind)
    layer = random_layer(rng, kind, 3)
    x = random_input(rng, kind, layer)
    on_gpu = copy.deepcopy(layer).cuda()
    ours, theirs = on_gpu(x.to("cuda")), layer(x)
    torch.testing.assert_close(ours.features.cpu(), theirs.features, rtol=1e-10, atol=1e-10)
    ours.features.square().sum().backward()
    theirs.features.square().sum().backward()
    for a, b in zip(on_gpu.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-10, atol=1e-10)


def test_a_cloud_without_sites_passes_and_gives_gradients_of_zero():
    x = SparseTensor(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 2, requires_grad=True), batch_size=3)
    layers = nn.Sequential(
        SparseConv(2, 3, 3, submanifold=False), SparseConv(3, 3, 2, 2), SparseConv(3, 2, 2, 2, transposed=True)
    )
    out = layers(x)
    assert out.shape == (0, 2) and out.batch_size == 3
    out.features.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layers.parameters())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kernel_size": 0}, "kernel_size=0: pass an integer of at least 1"),
        ({"kernel_size": (3, 3)}, r"kernel_size=\(3, 3\): .* one for each of 3 dimensions"),
        ({"kernel_size": None}, "kernel_size=None"),
        ({"stride": 0}, "stride=0: must be one positive integer"),
        ({"stride": (2, 2, 2)}, r"stride=\(2, 2, 2\): must be one positive integer"),
        ({"dilation": -1}, "dilation=-1"),
        ({"dimension": 5}, "dimension=5: sparse layers have 1 to 4"),
        ({"stride": 2, "submanifold": True}, r"must be 1 \(stride=2\)"),
        ({"offsets": []}, "at least one"),
        ({"offsets": [(0, 0)]}, "offsets of 3 integers"),
        ({"offsets": [(0, 0, 1), (0, 0, 1)]}, "distinct offsets"),
    ],
)
def test_invalid_options_of_a_layer_raise(options, says):
    with pytest.raises(ValueError, match=says):
        SparseConv(2, 2, **{"kernel_size": 3, **options})


def test_input_that_does_not_fit_raises():
    layer = SparseConv(3, 2, 3)
    with pytest.raises(dc.ShapeError, match="requires 3 channels, but its input has 2"):
        layer(random_cloud(rng_of(1), 3, 2))
    with pytest.raises(dc.ShapeError, match="of dimension=3 received coordinates of 2 dimensions"):
        layer(random_cloud(rng_of(1), 2, 3))
    with pytest.raises(dc.UnsupportedOperation, match="requires a SparseTensor, not Tensor"):
        layer(torch.zeros(1, 3, 4, 4, 4))
    with pytest.raises(dc.CoordinateError, match="transposed convolution of stride 2 needs"):
        SparseConv(3, 2, 2, 2, transposed=True)(random_cloud(rng_of(1), 3, 3))

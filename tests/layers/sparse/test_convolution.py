"""Sparse convolution against torch's dense one and against brute force, on random clouds."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.layers.sparse import SparseConv, SparseMaxPool, SparseTensor, from_dense, to_dense
from tests.layers.sparse.clouds import brute_force, dense_convolution, normal, random_cloud, rng_of, values_at

KINDS = ("submanifold", "wider", "strided", "all windows", "back to source", "generative")
CASES = 12
"""Random clouds and layers of each kind."""


def random_layer(rng, kind, dimension, *, boxes=False):
    """A layer of a kind: any kernel size, or any offsets."""
    kernel = tuple(rng.randint(1, 4 if dimension < 3 else 3) for _ in range(dimension))
    strides = tuple(rng.randint(1, 3) for _ in range(dimension)) if rng.random() < 0.5 else rng.randint(2, 3)
    groups = rng.choice((1, 1, 2, 3))
    choice = list(itertools.product(range(-2, 3), repeat=dimension))
    offsets = None if boxes or rng.random() < 0.6 else rng.sample(choice, rng.randint(1, 4))
    return SparseConv(
        groups * rng.randint(1, 2),
        groups * rng.randint(1, 2),
        kernel if offsets is None else None,
        1 if kind in ("submanifold", "wider") else strides,
        dimension,
        submanifold=kind == "submanifold",
        transposed=kind in ("back to source", "generative"),
        offsets=offsets,
        dilation=rng.choice((1, 1, 2, (2, 1, 2, 1)[:dimension])),
        padding=rng.choice((None, rng.randint(0, 2))) if offsets is None else None,
        groups=groups,
        all_windows=kind == "all windows",
        bias=rng.random() < 0.7,
    ).double()


def random_input(rng, kind, layer):
    """A cloud for the layer, with empty samples, sometimes without any site."""
    sites = 0 if rng.random() < 0.05 else 14
    stride = layer.stride if kind == "generative" else rng.choice((1, 1, 2, (2, 1, 3, 1)[: layer.dimension]))
    x = random_cloud(rng, layer.dimension, layer.in_channels, stride=stride, sites=sites)
    if kind == "back to source":
        x = SparseMaxPool(layer.stride, dimension=layer.dimension)(x)
        x = x.replace(x.features.detach().requires_grad_())
    return x


def box_of(layer):
    """The offsets of a box of the weight's extents, from the first offset on."""
    along = zip(layer.weight.shape[2:], layer.offsets[0], layer.dilation, strict=True)
    return tuple(itertools.product(*([first + d * i for i in range(k)] for k, first, d in along)))


def expected_sites(kind, x, layer):
    """As sets of rows, from the definition."""
    rows = x.coords.tolist()
    if kind == "submanifold":
        return {tuple(row) for row in rows}
    along = list(zip(x.sites.stride, layer.stride, strict=True))
    sizes = [a * s for a, s in along]
    if kind == "strided":
        return {(b, *(c // size * size for c, size in zip(u, sizes, strict=True))) for b, *u in rows}
    if kind == "back to source" and x.sites.source is not None:
        return {tuple(row) for row in x.sites.source.coords.tolist()}
    unit = [a // s for a, s in along] if layer.transposed else x.sites.stride
    sign = 1 if layer.transposed else -1
    reached = {
        (b, *(c + sign * step * o for c, o, step in zip(u, offset, unit, strict=True)))
        for b, *u in rows
        for offset in layer.offsets
    }
    if layer.transposed:
        return reached
    return {(b, *u) for b, *u in reached if all(c % size == 0 for c, size in zip(u, sizes, strict=True))}


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
    is_box = layer.dimension < 4 and len(layer.weight.shape) > 3 and layer.offsets == box_of(layer)
    compare(x, layer, dense_convolution if is_box else brute_force, out)


@pytest.mark.parametrize(("dimension", "dense"), [(1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)])
def test_state_dictionaries_are_those_of_torchs_convolutions(dimension, dense):
    ours, theirs = SparseConv(3, 4, 3, dimension=dimension).double(), dense(3, 4, 3, padding=1).double()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = random_cloud(rng_of("state", dimension), dimension, 3)
    torch.testing.assert_close(ours(x).features, dense_convolution(x, ours, x), rtol=1e-10, atol=1e-10)
    assert torch.equal(ours.weight, theirs.weight)


WINDOWS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 0},
    {"kernel_size": 2, "stride": 3, "padding": 2, "dilation": 2},
    {"kernel_size": (3, 1, 2), "stride": (1, 3, 2), "padding": (2, 0, 1), "dilation": (2, 1, 3)},
]


def volume_with_borders(dimension, seed):
    """A volume with a few active cells, also at its borders, and its sparse tensor."""
    shape = (7, 6, 8)[:dimension]
    active = torch.rand(3, *shape, generator=torch.Generator().manual_seed(seed)) < 0.15
    active[1] = False
    active[(0, *(n - 1 for n in shape))] = active[(2, *(0,) * dimension)] = True
    volume = (normal(3, 4, *shape, seed=seed) * active[:, None]).requires_grad_()
    return volume, active, from_dense(volume, active=active).with_spatial_shape(shape)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("options", WINDOWS)
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_all_windows_within_borders_are_torchs_convolution(dimension, options, groups):
    torch.manual_seed(0)
    options = {name: each if isinstance(each, int) else each[:dimension] for name, each in options.items()}
    volume, active, x = volume_with_borders(dimension, seed=2)
    layer = SparseConv(4, 8, dimension=dimension, groups=groups, all_windows=True, bias=False, **options).double()
    dense = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dimension]
    sizes = {name: each for name, each in options.items() if name != "kernel_size"}
    expected = dense(volume, layer.weight.contiguous(), groups=groups, **sizes)
    reached = dense(active[:, None].double(), torch.ones_like(layer.weight[:1, :1]), **sizes)[:, 0] > 0.5
    out = layer(x)
    assert out.spatial_shape == expected.shape[2:]
    cells = torch.cat([out.coords[:, :1], out.coords[:, 1:] // torch.tensor(out.sites.stride)], 1)
    assert cells.tolist() == reached.nonzero().tolist()
    dense_out = to_dense(out)
    torch.testing.assert_close(dense_out, expected, rtol=1e-10, atol=1e-10)
    direction = normal(*expected.shape, seed=3)
    ours, theirs = (torch.autograd.grad(y, [volume, layer.weight], direction) for y in (dense_out, expected))
    for a, b in zip(ours, theirs, strict=True):
        # The dense layer's gradient is not zero at inactive cells, too.
        mask = active[:, None] if a.shape == volume.shape else 1
        torch.testing.assert_close(a, b * mask, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", WINDOWS)
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_the_inverse_of_a_convolution_with_padding_returns_to_its_sites(dimension, options):
    options = {name: each if isinstance(each, int) else each[:dimension] for name, each in options.items()}
    _, active, x = volume_with_borders(dimension, seed=4)
    down = SparseConv(4, 3, dimension=dimension, all_windows=True, **options).double()
    up = SparseConv(3, 2, dimension=dimension, transposed=True, submanifold=False, bias=False, **options).double()
    middle = down(x)
    out = up(middle)
    assert out.sites is x.sites
    dense = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[dimension]
    sizes = {name: each for name, each in options.items() if name not in ("kernel_size", "padding")}
    # Without padding, which crops: the first cell of the result is then at minus the padding.
    expected = dense(to_dense(middle), up.weight.contiguous(), **sizes)
    padding = options["padding"] if isinstance(options["padding"], tuple) else (options["padding"],) * dimension
    ends = itertools.chain(*((0, n) for n in reversed(active.shape[1:])))
    at_sites = values_at(F.pad(expected, list(ends)), x.coords, padding)
    torch.testing.assert_close(out.features, at_sites, rtol=1e-10, atol=1e-10)
    wanted = [middle.features, up.weight]
    direction = normal(*out.shape, seed=5)
    ours, theirs = (torch.autograd.grad(y, wanted, direction) for y in (out.features, at_sites))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_transposed_convolution_of_all_windows_makes_sites_and_does_not_return():
    _, _, x = volume_with_borders(2, seed=6)
    coarse = SparseConv(4, 3, 2, 2, 2).double()(x)
    options = {"kernel_size": 3, "stride": 2, "dimension": 2, "transposed": True, "padding": 1, "all_windows": True}
    out = SparseConv(3, 2, **options).double()(coarse)
    reached = F.conv_transpose2d(
        to_dense(coarse.replace(torch.ones_like(coarse.features[:, :1]))), torch.ones(1, 1, 3, 3).double(), None, 2, 1
    )
    assert out.coords.tolist() == (reached[:, 0] > 0.5).nonzero().tolist()
    assert out.spatial_shape == reached.shape[2:] and out.stride == 1


def test_groups_equal_separate_convolutions_of_the_channels():
    x = random_cloud(rng_of("groups"), 3, 6, sites=60)
    layer = SparseConv(6, 6, 3, groups=3).double()
    parts = [SparseConv(2, 2, 3).double() for _ in range(3)]
    for n, part in enumerate(parts):
        part.load_state_dict({name: each[2 * n : 2 * n + 2] for name, each in layer.state_dict().items()})
    expected = torch.cat(
        [part(x.replace(x.features[:, 2 * n : 2 * n + 2])).features for n, part in enumerate(parts)], 1
    )
    torch.testing.assert_close(layer(x).features, expected, rtol=1e-12, atol=1e-12)


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
    "kind", [kind for kind in KINDS if kind != "back to source"]
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
        ({"stride": 0}, "stride=0: pass an integer of at least 1"),
        ({"stride": (2, 2)}, r"stride=\(2, 2\): .* one for each of 3 dimensions"),
        ({"dilation": -1}, "dilation=-1"),
        ({"padding": -1}, "padding=-1: pass an integer of at least 0"),
        ({"padding": 1, "offsets": [(0, 0, 0)]}, "padding=1 applies to a box"),
        ({"groups": 0}, "groups=0 must divide in_channels=2 and out_channels=2"),
        ({"groups": 2, "out_channels": 3}, "groups=2 must divide in_channels=2 and out_channels=3"),
        ({"all_windows": True, "submanifold": True}, "all_windows False"),
        ({"dimension": 5}, "dimension=5: sparse layers have 1 to 4"),
        ({"stride": 2, "submanifold": True}, r"must be 1 \(stride=2\)"),
        ({"offsets": []}, "at least one"),
        ({"offsets": [(0, 0)]}, "offsets of 3 integers"),
        ({"offsets": [(0, 0, 1), (0, 0, 1)]}, "distinct offsets"),
    ],
)
def test_invalid_options_of_a_layer_raise(options, says):
    with pytest.raises(ValueError, match=says):
        SparseConv(**{"in_channels": 2, "out_channels": 2, "kernel_size": 3, **options})


def test_input_that_does_not_fit_raises():
    layer = SparseConv(3, 2, 3)
    with pytest.raises(dc.ShapeError, match="requires 3 channels, but its input has 2"):
        layer(random_cloud(rng_of(1), 3, 2))
    with pytest.raises(dc.ShapeError, match="of dimension=3 received coordinates of 2 dimensions"):
        layer(random_cloud(rng_of(1), 2, 3))
    with pytest.raises(dc.UnsupportedOperation, match="requires a SparseTensor, not Tensor"):
        layer(torch.zeros(1, 3, 4, 4, 4))
    with pytest.raises(dc.CoordinateError, match=r"transposed convolution of stride \(2, 2, 2\) needs"):
        SparseConv(3, 2, 2, 2, transposed=True)(random_cloud(rng_of(1), 3, 3))

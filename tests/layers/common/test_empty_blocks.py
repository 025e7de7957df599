"""Ranks with empty blocks: their results have the dtype of the other ranks, and they raise the same errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.layers.common.empty_blocks import run_like_other_ranks
from tests.distconv.layouts import grid_over, normal, raises_everywhere

EMPTY_SOMEWHERE = pytest.mark.ranks(2, 3, 4)
"""Rank counts of tensors with one sample and channel, and one row fewer than ranks."""


def with_empty_blocks(comm, dtype, channels=1):
    """x (1, C, H, 6) of few rows, over samples, over channels, and over rows."""
    x = normal(1, channels, comm.size - 1, 6).to(dtype)
    return [dc.scatter(x, grid_over(comm, **{axis: comm.size})) for axis in "nch"]


def test_the_graph_is_that_of_a_block_with_elements():
    x, w = torch.zeros(0, 3, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    y = run_like_other_ranks(torch.matmul, (0, 2), x, w)
    assert y.shape == (0, 2)
    dx, dw = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros(3, 2))
    # dL/dx of a product depends on w, and dL/dw on x.
    assert torch.autograd.grad(dx.sum(), [w], retain_graph=True, allow_unused=True)[0] is not None
    assert torch.autograd.grad(dw.sum(), [x], allow_unused=True)[0] is not None


HALF: dict[str, Callable[..., torch.Tensor]] = {
    "transposed convolution": lambda x: F.conv_transpose2d(x, torch.ones(x.shape[1], 2, 2, 2), stride=2),
    "convolution": lambda x: F.conv2d(x, torch.ones(2, x.shape[1], 1, 1)),
    "local response norm": lambda x: F.local_response_norm(x, 2),
    "max pooling": lambda x: F.max_pool2d(x, 1),
    "max pooling in 3-D, with indices": lambda x: F.max_pool3d(x.unsqueeze(2), 1, return_indices=True)[0],
    "average pooling": lambda x: F.avg_pool2d(x, 1),
    "bilinear interpolation": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic interpolation": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "reflected padding": lambda x: F.pad(x, (1, 1, 0, 0), "reflect"),
    "adaptive average pooling": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive max pooling in 3-D": lambda x: F.adaptive_max_pool3d(x.unsqueeze(2), (1, 2, 1)),
    "interpolation by area": lambda x: F.interpolate(x, size=(5, 3), mode="area"),
    "sampling": lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 2, dtype=x.dtype), align_corners=False),
    "group norm": lambda x: F.group_norm(x, 1),
    "dropout": lambda x: (torch.manual_seed(0), F.dropout2d(x))[1],
    "unpooling": lambda x: F.max_unpool2d(x, torch.zeros(x.shape, dtype=torch.int64), 1),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.int64)),
    "cosine embedding": lambda x: F.cosine_embedding_loss(x[0, 0], x[0, 0], torch.ones(x.shape[2])),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "variance": lambda x: x.var(3),
    "dot": lambda x: torch.dot(x[0, 0, 0], x[0, 0, 0]),
    "matrix and vector": lambda x: torch.mv(x[0, 0], torch.ones(6, dtype=x.dtype)),
    "bilinear product": lambda x: F.bilinear(x[0], x[0], torch.ones(2, 6, 6, dtype=x.dtype)),
}


@EMPTY_SOMEWHERE
@pytest.mark.cpu
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HALF)
def test_under_autocast_all_ranks_have_torchs_dtype(comm, name, given):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = HALF[name](normal(1, 1, comm.size - 1, 6).to(given))
        for x in with_empty_blocks(comm, given):
            found = HALF[name](x)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(dc.gather(found), expected, rtol=0.05, atol=0.05)


REJECTED: dict[str, tuple[torch.dtype, Callable[..., torch.Tensor]]] = {
    "antialiasing in half precision": (
        torch.bfloat16,
        lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True),
    ),
    "average pooling in 3-D in half precision": (torch.float16, lambda x: F.avg_pool3d(x.unsqueeze(2), 1)),
    "a convolution of truth values": (torch.bool, lambda x: F.conv2d(x, torch.ones(2, 1, 1, 1, dtype=torch.bool))),
    "softmax of whole numbers": (torch.int64, lambda x: F.softmax(x, 3)),
    "interpolation of whole numbers": (torch.int64, lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "a maximum of complex numbers": (torch.complex128, lambda x: x.max(3)[0]),
}


@EMPTY_SOMEWHERE
@pytest.mark.cpu
@pytest.mark.parametrize("name", REJECTED)
def test_a_dtype_that_torch_rejects_raises_on_all_ranks(comm, name):
    dtype, call = REJECTED[name]
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        call(normal(1, 1, comm.size - 1, 6).to(dtype))
    for x in with_empty_blocks(comm, dtype):
        text = raises_everywhere(comm, dc.ShapeError, "not implemented|not support", lambda x=x: call(x))
        assert str(caught.value).partition(" ")[0] in text

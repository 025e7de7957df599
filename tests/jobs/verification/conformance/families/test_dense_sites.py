"""Volumes in place of sparse tensors: against the sparse layers in one process, and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.jobs.verification.conformance.families.dense_sites import Frame, frame_of, on_volumes
from distconv.jobs.verification.conformance.families.sparse import CASES
from distconv.jobs.verification.conformance.table import VALUES
from distconv.layers.sparse import SparseConv, SparseTensor, from_dense, to_dense

SIZES = {"n": 3, "c": 2, "d": 3, "h": 5, "w": 6}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.operator} {case.option}")
def test_sparse_layers_in_one_process_have_the_volumes_numbers(case):
    torch.manual_seed(0)
    layers = case.module(SIZES).double()
    x = VALUES["sites"](case.inputs[0].shape(SIZES), SIZES, torch.Generator().manual_seed(1)).requires_grad_()
    dense = on_volumes(layers, x)
    direction = torch.randn(dense.shape, dtype=torch.float64)
    expected = torch.autograd.grad((dense * direction).sum(), [x, *layers.parameters()])
    transposed = isinstance(layers[0], SparseConv) and layers[0].transposed
    y = layers(from_dense(x, active=(x.detach() != 0).any(1), stride=layers[0].stride if transposed else 1))
    if isinstance(y, SparseTensor):
        frame = Frame((0,) * (x.ndim - 2), tuple(x.shape[2:]))
        for layer in layers:
            frame = frame_of(layer, frame.cells) if hasattr(layer, "offsets") else frame
        y = to_dense(y, frame.cells, origin=[s * first for s, first in zip(y.sites.stride, frame.first, strict=True)])
    found = torch.autograd.grad((y * direction).sum(), [x, *layers.parameters()])
    for ours, theirs in zip((y, *found), (dense, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_outputs_are_where_a_kernel_reaches():
    layer = SparseConv(1, 1, None, dimension=1, submanifold=False, offsets=[[-1], [2]], bias=False)
    nn.init.ones_(layer.weight)
    x = torch.tensor([[[0.0, 5.0, 0.0]]])
    # out[u] = x[u - 1] + x[u + 2]: the 5 at 1 is seen from 2 and from -1.
    assert frame_of(layer, (3,)) == Frame((-2,), (6,))
    assert on_volumes(nn.Sequential(layer), x).tolist() == [[[0, 5, 0, 0, 5, 0]]]

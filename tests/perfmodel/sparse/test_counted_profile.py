"""Layer profiles of sparse networks: pairs found by brute force, and sizes by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.layers.sparse import SparseConv, SparseGlobalPool
from distconv.perfmodel.sparse.counted_profile import counted_profile
from distconv.perfmodel.sparse.recording import record
from tests.perfmodel.sparse.examples import cloud, machine


def test_a_layer_computes_the_pairs_of_sites_that_meet() -> None:
    torch.manual_seed(0)
    x = cloud(sites=60)
    model = nn.Sequential(
        SparseConv(2, 5, 3, bias=False),
        nn.ReLU(),
        SparseConv(5, 4, 2, stride=2),
        SparseGlobalPool(),
        nn.Linear(4, 7),
    ).double()
    found = counted_profile(record(model, x), machine(flops=1.0))
    sites = x.coords.tolist()
    meeting = sum(
        a[0] == b[0] and max(abs(i - j) for i, j in zip(a, b, strict=True)) <= 1 for a in sites for b in sites
    )
    coarse = {(a[0], *(c // 2 for c in a[1:])) for a in sites}
    work = [2 * meeting * 2 * 5, 0, 2 * len(sites) * 5 * 4, 0, 2 * 3 * 4 * 7]
    assert [layer.name for layer in found.layers] == ["0", "1", "2", "3", "4"]
    assert [layer.forward_s for layer in found.layers] == pytest.approx(work)
    # The first layer has no gradient of its input.
    assert [layer.backward_s for layer in found.layers] == pytest.approx([work[0], 0, 2 * work[2], 0, 2 * work[4]])
    assert [layer.activation_bytes for layer in found.layers] == [
        8 * n for n in (len(sites) * (4 + 5), len(sites) * (4 + 5), len(coarse) * (4 + 4), 3 * 4, 3 * 7)
    ]
    assert [layer.parameter_bytes for layer in found.layers] == [8 * n for n in (27 * 10, 0, 8 * 20 + 4, 0, 4 * 7 + 7)]


def test_the_second_call_of_a_layer_has_a_name_of_its_own() -> None:
    shared = SparseConv(2, 2, 3).double()
    names = [
        layer.name
        for layer in counted_profile(record(nn.Sequential(shared, shared), cloud()), machine(flops=1.0)).layers
    ]
    assert names == ["0", "0#2"]

"""Counted work of sparse layers against pairs found by brute force; cuts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.jobs.pointcloud.classification.layer_work import BACKWARD, balanced_cuts, counted_profile
from distconv.layers.models.sparse import sparse_resnet, sparse_vgg16_bn
from distconv.layers.sparse import SparseConv, SparseTensor
from distconv.perfmodel import Machine
from distconv.pipeline import SplitError, split
from tests.layers.sparse.clouds import random_cloud, rng_of


def cloud(sites: int = 60) -> SparseTensor:
    return random_cloud(rng_of("work", sites), 3, 1, sites=sites).detach()


def test_a_convolution_takes_the_pairs_of_sites_that_meet() -> None:
    x, model = cloud(), nn.Sequential(SparseConv(1, 5, 3, bias=False), nn.ReLU(), SparseConv(5, 2, 2, stride=2))
    found = counted_profile(model.double(), x)
    sites = x.coords.tolist()
    meeting = sum(
        a[0] == b[0] and max(abs(i - j) for i, j in zip(a, b, strict=True)) <= 1 for a in sites for b in sites
    )
    roofline = Machine.load("localhost").computing(1).roofline
    expected = roofline.time(2 * meeting * 5, 8 * meeting * 6 + 27 * 5 * 8, len(sites) * 5)
    assert found.layers[0].forward_s == pytest.approx(expected, rel=1e-12)
    assert found.layers[0].backward_s == BACKWARD * found.layers[0].forward_s
    assert found.layers[0].activation_bytes == len(sites) * (4 + 5) * 8
    coarse = {(a[0], *(c // 2 for c in a[1:])) for a in sites}
    assert found.layers[2].activation_bytes == len(coarse) * (4 + 2) * 8
    assert [layer.parameter_bytes for layer in found.layers] == [27 * 5 * 8, 0, (8 * 5 * 2 + 2) * 8]


@pytest.mark.parametrize("model", [sparse_vgg16_bn(2), sparse_resnet(4)], ids=["vgg", "resnet"])
@pytest.mark.parametrize("replicas", [[1, 1], [2, 1], [1, 1, 1]], ids=str)
def test_no_stage_is_a_layer_above_its_share(model: nn.Module, replicas: list[int]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = cloud(200).to(torch.float32)
    cuts = balanced_cuts(model, x, replicas)
    assert len(split(model, cuts)) == len(replicas)
    layers = counted_profile(model, x).layers
    names = [layer.name for layer in layers]
    edges = [0, *map(names.index, cuts), len(names)]
    times = [layer.time_s for layer in layers]
    shares = [sum(times[a:b]) / count for a, b, count in zip(edges, edges[1:], replicas, strict=False)]
    blocks = [
        index for index, name in enumerate(names) if isinstance(model.get_submodule(name), SparseConv | nn.Linear)
    ]
    largest = max(sum(times[a:b]) for a, b in zip(blocks, [*blocks[1:], len(names)], strict=True))
    assert max(shares) <= sum(times) / sum(replicas) + largest
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(SplitError, match="Sequential has 1 layers to cut at, too few for 2 parts"):
        balanced_cuts(nn.Sequential(SparseConv(1, 2, 3), nn.ReLU()).double(), cloud(), [1, 1])

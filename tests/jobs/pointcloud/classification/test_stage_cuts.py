"""Cuts of sparse networks: how even the parts are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.jobs.pointcloud.classification.stage_cuts import balanced_cuts
from distconv.layers.models.sparse import sparse_resnet, sparse_vgg16_bn
from distconv.layers.sparse import SparseConv, SparseTensor
from distconv.perfmodel import Machine
from distconv.perfmodel.sparse.counted_profile import counted_profile
from distconv.perfmodel.sparse.recording import record
from distconv.pipeline import SplitError, split
from tests.layers.sparse.clouds import random_cloud, rng_of


def cloud(sites: int = 60) -> SparseTensor:
    return random_cloud(rng_of("work", sites), 3, 1, sites=sites).detach()


@pytest.mark.parametrize("model", [sparse_vgg16_bn(2), sparse_resnet(4)], ids=["vgg", "resnet"])
@pytest.mark.parametrize("replicas", [[1, 1], [2, 1], [1, 1, 1]], ids=str)
def test_no_stage_is_a_layer_above_its_share(model: nn.Module, replicas: list[int]) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = cloud(200).to(torch.float32)
    cuts = balanced_cuts(model, x, replicas)
    assert len(split(model, cuts)) == len(replicas)
    layers = counted_profile(record(model, x), Machine.load("localhost")).layers
    names = [layer.name for layer in layers]
    edges = [0, *map(names.index, cuts), len(names)]
    times = [layer.time_s for layer in layers]
    shares = [sum(times[a:b]) / count for a, b, count in zip(edges, edges[1:], replicas, strict=False)]
    blocks = [
        index
        for index, name in enumerate(names)
        if isinstance(dict(model.named_modules()).get(name), SparseConv | nn.Linear)
    ]
    largest = max(sum(times[a:b]) for a, b in zip(blocks, [*blocks[1:], len(names)], strict=True))
    assert max(shares) <= sum(times) / sum(replicas) + largest
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(SplitError, match="Sequential: has 1 layers to split at, too few for 2 parts"):
        balanced_cuts(nn.Sequential(SparseConv(1, 2, 3), nn.ReLU()).double(), cloud(), [1, 1])

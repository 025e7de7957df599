"""The networks for point clouds against their dense equivalents."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.models.sparse import (
    dense_resnet,
    dense_unet,
    dense_vgg16_bn,
    sparse_resnet,
    sparse_unet,
    sparse_vgg16_bn,
)
from distconv.layers.sparse import SparseTensor, from_dense, to_dense

SPARSE_AND_DENSE = {
    "vgg16_bn": (sparse_vgg16_bn, dense_vgg16_bn, 32),
    "resnet": (sparse_resnet, dense_resnet, 16),
    "unet": (sparse_unet, dense_unet, 16),
}
"""Both factories, and the extent of a volume: the largest stride or a multiple."""


def equal_networks(name):
    sparse, dense, extent = SPARSE_AND_DENSE[name]
    torch.manual_seed(0)
    ours, theirs = sparse(width=2, in_channels=3, classes=4).double(), dense(width=2, in_channels=3, classes=4).double()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm3d):
            for values in (module.weight.data, module.bias.data, module.running_mean):
                values.copy_(torch.randn_like(values))
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, extent


def with_masked_inputs(network, occupied):
    """``network`` with zeros at inactive voxels after every layer; ``occupied`` (B, 1, D, H, W) is 1 elsewhere."""
    masks = {occupied.shape[2]: occupied}
    while min(masks) > 1:
        coarse = F.max_pool3d(masks[min(masks)], 2)
        masks[coarse.shape[2]] = coarse

    def zero_elsewhere(module, inputs, output):
        return output * masks[output.shape[2]] if output.ndim == 5 else output

    for module in network.modules():
        if not list(module.children()) and not isinstance(module, (nn.AdaptiveMaxPool3d, nn.ReLU)):
            module.register_forward_hook(zero_elsewhere)
    return network


def same_gradients(ours, theirs):
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", SPARSE_AND_DENSE)
def test_twins_are_equal_in_evaluation_with_zeros_at_inactive_voxels(name):
    ours, theirs, extent = equal_networks(name)
    generator = torch.Generator().manual_seed(1)
    occupied = (torch.rand(2, 1, extent, extent, extent, generator=generator) < 0.02).double()
    volume = torch.randn(2, 3, extent, extent, extent, generator=generator, dtype=torch.float64) * occupied
    x = from_dense(volume)
    y = ours.eval()(x)
    expected = with_masked_inputs(theirs.eval(), occupied)(volume)
    if isinstance(y, SparseTensor):
        y = to_dense(y, (extent,) * 3)
    assert y.abs().sum() > 0
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    y.square().mean().backward()
    expected.square().mean().backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("name", SPARSE_AND_DENSE)
def test_twins_are_equal_in_training_where_all_voxels_are_active(name):
    ours, theirs, extent = equal_networks(name)
    volume = torch.randn(2, 3, extent, extent, extent, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = ours(from_dense(volume))
    expected = theirs(volume)
    if isinstance(y, SparseTensor):
        y = to_dense(y)
    torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-8)
    y.square().mean().backward()
    expected.square().mean().backward()
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=name)
    same_gradients(ours, theirs)


def test_the_unet_finds_its_maps_again_on_the_way_up():
    coords = torch.tensor([[0, a, a % 7, a % 5] for a in range(50)])
    x = SparseTensor(coords, torch.ones(50, 1))
    y = sparse_unet(width=2, depth=2)(x)
    manager = x.coordinate_manager
    assert y.sites is x.sites
    # Submanifold maps at three levels, two strided ones, the identity of the prediction; 16 convolutions in all.
    assert (manager.misses, manager.hits) == (6, 9)

"""MONAI's networks, unmodified, as three stages on three ranks: every bit of one process."""

from __future__ import annotations

import pytest
import torch

from distconv.pipeline import Pipeline, possible_cuts, split
from tests.distconv.layouts import normal
from tests.layers.models.third_party_networks import _monai, built, tensors
from tests.pipeline.training import SGD, assert_same, train_plainly

NETWORKS = {
    "AttentionUnet": _monai("AttentionUnet", 5, 1, 16, 24, channels=(4, 8, 16), strides=(2, 2)),
    "BasicUNet": _monai("BasicUNet", 5, 1, 32, 32, features=(4, 4, 8, 8, 16, 4)),
    "DenseNet": _monai("DenseNet", 5, 1, 33, 35, init_features=8, growth_rate=4, block_config=(2, 2)),
    "DynUNet": _monai("DynUNet", 5, 2, 16, 24, kernel_size=(3, 3, 3), strides=(1, 2, 2), upsample_kernel_size=(2, 2),
        filters=(4, 8, 16), res_block=True),
    "EfficientNetBN": _monai("EfficientNetBN", 5, 3, 32, 40, model_name="efficientnet-b0", pretrained=False,
        num_classes=3),
    "FlexibleUNet": _monai("FlexibleUNet", 5, 3, 32, 64, backbone="efficientnet-b0", decoder_channels=(16, 8, 8, 8, 8)),
    "HighResNet": _monai("HighResNet", 5, 1, 16, 17),
    "SegResNet": _monai("SegResNet", 5, 1, 16, 24, init_filters=8),
    "SEResNet50": _monai("SEResNet50", 5, 3, 33, 35, num_classes=3),
    "UNet": _monai("UNet", 5, 1, 16, 24, channels=(4, 8, 16), strides=(2, 2), num_res_units=2),
    "UNETR": _monai("UNETR", 5, 1, 32, 48, img_size=(32, 48), feature_size=8, hidden_size=24, mlp_dim=48, num_heads=3),
    "ViT": _monai("ViT", 5, 1, 32, 48, img_size=(32, 48), patch_size=(8, 8), hidden_size=24, mlp_dim=48, num_layers=3,
        num_heads=3, classification=True, num_classes=3),
    "VNet": _monai("VNet", 5, 1, 32, 48),
}  # fmt: skip
"""The five that torch.fx cannot follow are among them: they are recorded with an example."""


def loss(output, target):
    return torch.stack([(y.flatten(1).mean(1) - target).square().mean() for y in tensors(output)]).sum()


def network(name):
    """The network without dropout, for which a pipeline draws other numbers than plain torch."""
    model = built(NETWORKS[name])
    for module in model.modules():
        for probability in ("p", "drop_connect_rate"):
            if isinstance(getattr(module, probability, None), float):
                setattr(module, probability, 0.0)
    return model


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("name", NETWORKS)
def test_three_stages_of_an_unmodified_network_train_as_one_process(comm, name):
    alone, model = network(name), network(name)
    shape = NETWORKS[name].shape
    example = torch.empty(2, *shape[1:], dtype=torch.float64)
    cuts = possible_cuts(model, example)
    cuts = [cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]]
    batches = [(normal(*shape, seed=seed), normal(shape[0], seed=9 + seed)) for seed in range(3)]
    pipe = Pipeline(split(model, cuts, example), comm, "1f1b-so", loss, 2, optimizer=SGD)
    assert [pipe.step(*batch) for batch in batches] == train_plainly([alone], batches, 2, loss)
    pipe.synchronize()
    assert_same([model], [alone])
    pipe.close()

"""ResNet-50 as published."""

from __future__ import annotations

from torch import nn

from distconv.layers.models import MODELS


def test_resnet50_has_fifty_layers_and_projections_in_four_blocks() -> None:
    model = MODELS["resnet50"](width=2)
    names = [name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    projections = [name for name in names if "downsample" in name]
    assert projections == [f"layer{stage}.0.downsample.0" for stage in (1, 2, 3, 4)]
    assert len(names) - len(projections) == 50
    assert names[:2] == ["conv1", "layer1.0.conv1"]
    assert names[-1] == "classifier"
    assert not any(isinstance(m, nn.Linear) for m in model.modules())

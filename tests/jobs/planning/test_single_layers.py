"""Single layers of the paper, and predictions for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distconv.jobs.planning.single_layers import LAYERS, predict_times
from distconv.layers.models import MODELS
from distconv.perfmodel.machine.machine import Machine
from tests.jobs.planning import planned_files


def test_predictions_are_those_of_the_machine(tmp_path: Path) -> None:
    planned_files.write(tmp_path)
    one_gflops = Machine.load(tmp_path / "tiny.yaml")
    flops = 2 * 4 * 28 * 28 * 512 * 128
    alone = predict_times(LAYERS["res3b_branch2a"], 4, {}, 1, one_gflops)
    assert alone == {"FP": pytest.approx(flops / 1e9, rel=1e-6), "BP": pytest.approx(2 * flops / 1e9, rel=1e-6)}
    split = predict_times(LAYERS["res3b_branch2a"], 4, {"h": 4}, 4, one_gflops)
    assert split["FP"] == pytest.approx(alone["FP"] / 4, rel=1e-6)


@pytest.mark.parametrize(("name", "block"), [("mesh_conv1_1", 0), ("mesh_conv6_1", 5)])
def test_mesh_layers_are_those_of_our_model(name: str, block: int) -> None:
    layer, ours = LAYERS[name].build(), MODELS["mesh2k"]().get_submodule(f"blocks.{block}.0")
    assert str(layer) == str(ours)
    assert LAYERS[name].extent == MODELS["mesh2k"].sample[1] // 2**block


def test_the_other_layers_are_those_of_resnet50() -> None:
    """conv1 is padded by 3, and res3b_branch2a is the first convolution of the second block of the third stage."""
    resnet = MODELS["resnet50"]()
    for name, submodule in (("conv1", "conv1"), ("res3b_branch2a", "layer2.1.conv1")):
        assert str(LAYERS[name].build()) == str(resnet.get_submodule(submodule))
    shapes = [layer.input_shape(3) for layer in LAYERS.values()]
    assert shapes == [(3, 3, 224, 224), (3, 512, 28, 28), (3, 18, 2048, 2048), (3, 128, 64, 64)]
    weight = LAYERS["conv1"].build().weight
    torch.manual_seed(0)
    assert torch.equal(weight, torch.nn.Conv2d(3, 64, 7, bias=False).weight)

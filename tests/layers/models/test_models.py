"""The reference models: structure, published numbers of parameters, and shapes of the predictions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from distconv.layers.models import MODELS, mesh1k, mesh2k
from tests.jobs.approved import assert_approved

PUBLISHED = {
    "lenet5": (60_000 - 12 - 32 + 900 + 850, 1),  # the text of layers/models/lenet.py says what is other
    "alexnet": (2.47e6, 1e4),
    "vgg11_bn": (9.76e6, 1e4),
    "vgg16_bn": (15.25e6, 1e4),
    "resnet20": (0.27e6, 1e4),
    "resnet56": (0.85e6, 1e4),
    "resnet110": (1.7e6, 1e5),
    "resnet50": (25.56e6, 1e4),
    "cosmoflow": (9.44e6, 1e4),
}
"""Number of parameters, and the unit of its last digit."""

SMALLEST = {"lenet5": 28, "alexnet": 29, "vgg11": 32, "vgg11_bn": 32, "vgg16": 32, "vgg16_bn": 32}
"""Extents below which a network's last features would vanish."""


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    published, unit = PUBLISHED[name]
    with torch.device("meta"):
        assert abs(parameters(MODELS[name]()) - published) <= unit / 2


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_any_number_of_channels_and_classes_and_any_size(name: str) -> None:
    model = MODELS[name](in_channels=2, classes=3, width=3).eval()
    smallest = SMALLEST.get(name, 17)
    size = [smallest + odd for odd in (0, 5, 2)[: len(MODELS[name].sample) - 1]]
    y = model(torch.zeros(2, 2, *size))
    assert y.shape == ((2, 3, *size) if MODELS[name].predicts == "cells" else (2, 3))


@pytest.mark.parametrize(("factory", "layers"), [(mesh1k, 3), (mesh2k, 5)])
def test_the_mesh_models_are_six_blocks_that_halve_the_resolution_first(factory: Any, layers: int) -> None:
    model = factory(width=4)
    assert len(model.blocks) == 6
    for block in model.blocks:
        convolutions = [m for m in block if isinstance(m, nn.Conv2d)]
        assert [c.stride for c in convolutions] == [(2, 2), *[(1, 1)] * (layers - 1)]
        assert all(c.kernel_size == (3, 3) and c.padding == (1, 1) for c in convolutions)
        assert [type(m) for m in block] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * layers
    assert model.blocks(torch.zeros(2, 18, 128, 64)).shape == (2, 4, 2, 1)


def test_outputs_are_as_approved_and_every_parameter_gets_a_gradient() -> None:
    lines = []  # one test, so that the short run has all models
    for name, reference in MODELS.items():
        torch.manual_seed(0)
        model = reference(in_channels=2, classes=3, width=3).double().train()
        smallest = SMALLEST.get(name, 16)
        x = torch.randn(2, 2, *[2 * smallest] * (len(reference.sample) - 1), dtype=torch.float64)
        y = model(x)
        y.square().sum().backward()
        lines.append(f"{name}: mean {y.mean().item():.4g}, mean of squares {y.square().mean().item():.4g}")
        weights = {
            key: p for key, p in model.named_parameters() if not key.endswith(".bias")
        }  # 0 in front of batch norm
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in weights.values()), name
    assert_approved("model-outputs", "\n".join(lines))


def test_shapes_of_all_layers_are_as_approved() -> None:
    """Meta tensors: no values are computed."""
    lines = []
    for name, reference in MODELS.items():
        with torch.device("meta"):
            model = reference(in_channels=reference.sample[0])
        lines.append(f"{name}:")
        for path, module in model.named_modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(partial(_describe_output, lines, path))
        model(torch.empty(2, *reference.sample, device="meta"))
    assert_approved("model-shapes", "\n".join(lines))


def _describe_output(lines: list[str], path: str, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    lines.append(f"    {path} {type(module).__name__} {tuple(inputs[0].shape)} -> {tuple(output.shape)}")

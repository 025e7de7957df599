"""Training with captured steps: losses and all final values are bitwise equal to those without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.layers.models import MODELS
from tests.distconv.capture.trained import adam, assert_equal, sgd, training_state
from tests.distconv.layouts import normal
from tests.layers.models.test_reference_models import CASES, Case
from tests.layers.models.third_party_networks import LARGE, NETWORKS, built, tensors

STEPS = 20
GRIDS = {2: ["n=2", "h=2", "c=2"], 4: ["h=2,w=2", "n=2,c=2"]}
SMALL = ("lenet5", "resnet20", "unet", "unet3d", "ResNeXt", "SqueezeNet", "MONAI SegResNet")
"""Those that 4 ranks train, too."""

QUICK = ("lenet5", "alexnet")
"""Those whose training takes little enough for every run of the tests."""


def case_of_model(case: Case) -> nn.Module:
    torch.manual_seed(4)
    return MODELS[case.model](width=case.width, in_channels=case.in_channels, classes=case.classes)


def all_cases() -> Iterator[Any]:
    """Name, what builds the network, and the shape of its input."""
    for case in CASES:
        shape = (3, case.in_channels, *case.size)
        marks = [] if case.model in QUICK else [pytest.mark.slow]
        yield pytest.param(
            case.model, lambda case=case: case_of_model(case), shape, torch.float32, marks=marks, id=case.model
        )
    for name, network in {**NETWORKS, **LARGE}.items():
        marks = [] if name in QUICK else [pytest.mark.slow]
        build = lambda network=network: built(network)  # noqa: E731 - one of many
        yield pytest.param(name, build, network.shape, network.dtype, marks=marks, id=name)


def train(model: nn.Module, images: list[torch.Tensor], optimizer: Any, captured: bool) -> list[Any]:
    """Losses of all steps, and what they have left: gradients, weights and buffers."""
    torch.manual_seed(7)  # for dropout and stochastic depth
    opt = optimizer(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        outputs = tensors(model(x))
        loss = torch.stack([(y * torch.sigmoid(y)).mean() for y in outputs]).sum()
        loss.backward()
        return loss

    taken = dc.capture(step, images[0]) if captured else step
    kept = []
    for x in images:
        opt.zero_grad()
        kept.append(taken(x).local.detach().clone())
        opt.step()
    return [*kept, *training_state(model)]


def check(comm: Any, build: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        images = [dc.scatter(normal(*shape, seed=8 + number).to(dtype), grid) for number in range(STEPS)]
        for optimizer in (sgd, adam):
            expected = train(dc.parallelize(build(), grid), images, optimizer, False)
            assert_equal(train(dc.parallelize(build(), grid), images, optimizer, True), expected)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.time_limit(400)
@pytest.mark.parametrize(("name", "build", "shape", "dtype"), list(all_cases()))
def test_twenty_steps_of_sgd_and_adam_on_two_ranks(comm: Any, name: str, build: Any, shape: Any, dtype: Any) -> None:
    check(comm, build, shape, dtype)


@pytest.mark.ranks(4)
@pytest.mark.slow
@pytest.mark.time_limit(400)
@pytest.mark.parametrize(("name", "build", "shape", "dtype"), [each for each in all_cases() if each.id in SMALL])
def test_twenty_steps_of_sgd_and_adam_on_four_ranks(comm: Any, name: str, build: Any, shape: Any, dtype: Any) -> None:
    check(comm, build, shape, dtype)

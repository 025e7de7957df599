"""One stage without ranks: versions of its weights, and what it may overwrite."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.models import MODELS
from distconv.pipeline.reference.serial import SerialPipeline
from distconv.pipeline.reference.serial_stage import SerialStage
from distconv.pipeline.splitting.split import split
from distconv.pipeline.stage.structures import Boundary
from tests.pipeline.reference.definition import RATE, WIDTH
from tests.pipeline.reference.test_serial import SGD, STILL, float64, images, samples

__all__ = ["float64"]


class Overwriting(nn.Module):
    """Changes what tanh needs for its gradient."""

    def forward(self, x):
        y = torch.tanh(x)
        z = y * 2
        y.add_(1)
        return z


def test_an_activation_that_is_overwritten_is_found():
    pipe = SerialPipeline([nn.Sequential(nn.Linear(WIDTH, WIDTH), Overwriting())], F.mse_loss, SGD)
    with pytest.raises(RuntimeError, match="changed in place since its forward"):
        pipe.step(*samples(1)[0])


@pytest.mark.parametrize("weights", ["newest", "stash", "predict"])
@pytest.mark.parametrize(("name", "cuts"), [("alexnet", ["features.1", "features.4"]), ("resnet50", ["relu", 4])])
def test_a_stage_may_begin_with_an_operation_in_place(name, cuts, weights):
    model = MODELS[name](width=4, classes=10)
    alone, (x, target) = copy.deepcopy(model), images(1, size=33)[0]
    pipe = SerialPipeline(split(model, cuts), F.cross_entropy, STILL, weights=weights)
    pipe.step(x, target)
    pipe.drain()
    F.cross_entropy(alone(x), target).backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_recomputed_stages_may_overwrite_their_input():
    def losses(inplace):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.ELU(inplace=inplace), nn.Linear(WIDTH, WIDTH)), nn.ELU(inplace=inplace)]
        pipe = SerialPipeline(stages, F.mse_loss, SGD, weights="recompute")
        for batch in samples(4):
            pipe.step(*batch)
        pipe.drain()
        return pipe.losses

    assert losses(inplace=True) == losses(inplace=False)


def test_a_stage_that_changes_what_the_one_before_needs_is_refused_as_in_one_process():
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.ReLU(inplace=True)]
    pipe = SerialPipeline(stages, F.mse_loss, partial(torch.optim.SGD, lr=0.1), "gpipe")
    with pytest.raises(RuntimeError, match=r"in.place"):
        pipe.step(torch.randn(2, WIDTH), torch.randn(2, WIDTH))


def test_old_versions_are_copies_and_later_ones_go_on_as_the_last_update_did():
    """Gradients of one and SGD without momentum: each update takes ``RATE`` off every weight."""
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    stage = SerialStage(0, module, partial(torch.optim.SGD, lr=RATE))
    first = module.weight.detach().clone()
    for _ in range(3):
        module.weight.grad = torch.ones_like(module.weight)
        stage.update(needed_from=1)
    assert stage.version == 3 and sorted(stage.copies) == [1, 2]
    assert stage.weights_of(3) is None
    torch.testing.assert_close(stage.weights_of(1)[0], first - RATE)
    torch.testing.assert_close(stage.weights_of(5)[0], first - 5 * RATE)


@pytest.mark.parametrize("keep", [True, False])
def test_a_pass_with_given_weights_leaves_its_own_and_gives_those_weights_gradients(keep):
    module = nn.Linear(WIDTH, 1, bias=False)
    stage, own = SerialStage(1, module, SGD), module.weight.detach().clone()
    given, x = torch.full_like(own, 2.0), torch.randn(4, WIDTH)
    stage.forward(0, Boundary([x]), lambda inputs: Boundary([module(*inputs.tensors)]), [given], keep)
    (gradient,) = stage.backward(0, (torch.ones(4, 1),), [given])
    assert torch.equal(module.weight, own)
    torch.testing.assert_close(gradient, given.expand(4, WIDTH))
    torch.testing.assert_close(module.weight.grad, x.sum(0, keepdim=True))
    assert stage.flights == {}

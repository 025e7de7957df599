"""Helpers of the tests of the runtime: stages, mini-batches, and a training loop in plain torch."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from distconv.pipeline import Pipeline, SerialPipeline
from distconv.pipeline.reference.serial import IN_FLIGHT

CHANNELS, CLASSES = 2, 3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SIZES = ((5, 4, 4), (3, 6, 5), (5, 3, 3), (2, 7, 7), (4, 4, 6))
"""Shape of mini-batches: samples, rows, columns."""


def batches(count, sizes=SIZES, maps=False):
    """``count`` mini-batches of images and classes, of changing size; with ``maps`` each pixel has a class."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        samples, *space = sizes[number % len(sizes)]
        x = torch.randn(samples, CHANNELS, *space, generator=generator, dtype=torch.float64)
        found.append((x, torch.randint(CLASSES, (samples, *space) if maps else (samples,), generator=generator)))
    return found


def label(value):
    """A case's id: names as they are, options as ``name=value``."""
    if isinstance(value, str):
        return value
    return "-".join(f"{name}={each}" for name, each in value.items()) or "default"


def convolutions(count, dropout=0.0, inplace=True):
    """``count`` stages: one in four has no parameters, and some begin with an operation in place."""
    torch.manual_seed(3)
    kinds = (
        lambda: [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)],
        lambda: [nn.ReLU(inplace), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)],
        lambda: [nn.ReLU(inplace), nn.Dropout(dropout)],
        lambda: [nn.BatchNorm2d(CHANNELS, momentum=None), nn.Tanh()],
    )
    made = [kinds[index % 4]() for index in range(count)]
    made[-1] += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES)]
    return [nn.Sequential(*layers).double() for layers in made]


class Chain(nn.Module):
    """Stages one after the other, as a pipeline calls them."""

    def __init__(self, stages):
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, *values):
        for stage in self.stages:
            found = stage(*values)
            values = tuple(found) if isinstance(found, (tuple, list)) else (found,)
        return found


def train_plainly(stages, data, microbatches=1, loss=F.cross_entropy, optimizer=SGD):
    """One process, one micro-batch after the other; trains ``stages`` and returns the losses."""
    model = Chain(stages)
    updates = optimizer(list(model.parameters()) or [torch.zeros(1)])
    losses = []
    for x, target in data:
        updates.zero_grad()
        count, total = min(microbatches, len(x)), 0.0
        for piece, its_target in zip(x.tensor_split(count), target.tensor_split(count), strict=True):
            share = len(piece) / len(x)
            each = loss(model(piece), its_target)
            if each.requires_grad:
                (each * share).backward()
            total += float(each.detach()) * share
        updates.step()
        losses.append(total)
    return losses


def assert_trains_as_one_process(
    comm, stages, data, schedule, microbatches=1, loss=F.cross_entropy, optimizer=SGD, weights=None, **options
):
    """Losses and state have the bits of plain torch, or of the serial pipeline if the schedule is asynchronous."""
    alone = copies(stages)
    if schedule in IN_FLIGHT:
        serial = SerialPipeline(alone, loss, optimizer, schedule, weights=weights)
        expected = [serial.step(*batch) for batch in data]
        serial.drain()
    else:
        expected = train_plainly(alone, data, microbatches, loss, optimizer)
    pipe = Pipeline(stages, comm, schedule, loss, microbatches, optimizer=optimizer, weights=weights, **options)
    assert [pipe.step(*batch) for batch in data] == expected
    pipe.drain()
    pipe.synchronize()
    assert_same(stages, alone)
    pipe.close()


def copies(stages):
    return copy.deepcopy(stages)


def states(stages):
    """Parameters and buffers of all stages by name."""
    return {f"{i}.{name}": value for i, stage in enumerate(stages) for name, value in stage.state_dict().items()}


def assert_same(found, expected):
    """All parameters and buffers have the same bits."""
    found, expected = states(found), states(expected)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_close(found, expected, rtol=1e-10):
    found, expected = states(found), states(expected)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=rtol / 100, msg=lambda m, n=name: f"{n}: {m}")

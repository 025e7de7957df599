"""Stages whose tensors are distributed over grids of their own: one process's numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.pipeline import Pipeline, SerialPipeline
from distconv.pipeline.reference.serial import IN_FLIGHT
from distconv.tensor import DistTensor
from tests.pipeline.training import Chain, assert_close, batches, states, train_plainly

# Small steps: whatever weights differ by is not blown up in a few of them.
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
GRIDS = {
    2: [[{"h": 2}], [{"n": 2}], [{"c": 2}]],
    3: [[{"h": 2}, None], [None, {"c": 2}], [None, {"w": 2}], [{"n": 2}, None], [{"n": 3}], [{"h": 2}, {}]],
    4: [[{"h": 2}, {"n": 2}], [{"c": 2}, {"w": 2}], [{"n": 2}, {"n": 2}], [None, {"h": 2}, None], [{"h": 2, "w": 2}]],
    6: [[{"h": 2, "w": 2}, {"n": 2}], [None, {"h": 3}, {"c": 2}], [{"h": 2, "n": 2}, None, None]],
}
WITH_REPLICAS = {
    4: [((2,), [{"h": 2}])],
    6: [((2, 2), [{"h": 2}, None]), ((2, 1), [{"c": 2}, {"w": 2}])],
}
SIZES = ((4, 7, 9), (3, 8, 7), (4, 9, 8))


def images(count, sizes=SIZES):
    return batches(count, sizes, maps=True)


def segmentation(count):
    """``count`` stages that give scores of 3 classes for each pixel (N, 3, H, W)."""
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 4, 3, padding=1)]
    between = [[nn.ReLU(True), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)] for _ in range(count - 2)]
    head = [nn.ReLU(True), nn.Conv2d(4, 4, 5, padding=2), nn.Tanh(), nn.Conv2d(4, 3, 1)]
    stages = [body + head] if count == 1 else [body, *between, head]
    return [nn.Sequential(*each).double() for each in stages]


def classification(count):
    """``count`` stages; the last has features (N, C) within, and where there are three, is given them."""
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2)]
    pooled = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    head = [nn.Linear(4, 6), nn.ReLU(True), nn.Linear(6, 3)]
    stages = {1: [body + pooled + head], 2: [body, pooled + head], 3: [body, pooled, head]}[count]
    return [nn.Sequential(*each).double() for each in stages]


def label(grids):
    return " ".join(",".join(f"{k}{v}" for k, v in (grid or {}).items()) or "1" for grid in grids)


def train(comm, stages, data, schedule, microbatches=1, loss=F.cross_entropy, optimizer=SGD, **options):
    """The stages after training them over ranks; every rank has been told the same losses."""
    pipe = Pipeline(stages, comm, schedule, loss, microbatches, optimizer=optimizer, **options)
    for batch in data:
        pipe.step(*batch)
    pipe.drain()
    told = comm.allgather(pipe.losses)
    assert all(each == told[0] for each in told)
    pipe.synchronize()
    losses = [value for _, value in pipe.losses]
    pipe.close()
    return losses, stages


def assert_as_one_process(comm, make, data, schedule, microbatches, grids, optimizer=SGD, weights=None, **options):
    count = len(grids)
    alone = make(count)
    if schedule in IN_FLIGHT:
        serial = SerialPipeline(alone, F.cross_entropy, optimizer, schedule, weights=weights)
        for batch in data:
            serial.step(*batch)
        serial.drain()
        expected = [value for _, value in serial.losses]
    else:
        expected = train_plainly(alone, data, microbatches, optimizer=optimizer)
    losses, stages = train(
        comm, make(count), data, schedule, microbatches, plans=grids, optimizer=optimizer, weights=weights, **options
    )
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    plain = [dc.gather(state) if isinstance(state, DistTensor) else state for state in states(stages).values()]
    for (name, value), found in zip(states(alone).items(), plain, strict=True):
        torch.testing.assert_close(found.detach(), value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.long
@pytest.mark.ranks(2, 3, 4, 6)
def test_label_maps_over_grids(comm):
    for grids in GRIDS[comm.size]:
        assert_as_one_process(comm, segmentation, images(3), "1f1b-sno", 2, grids)


@pytest.mark.ranks(4, 6)
def test_replicas_over_grids(comm):
    for replicas, grids in WITH_REPLICAS[comm.size]:
        assert_as_one_process(comm, segmentation, images(3), "zero-bubble", 3, grids, replicas=replicas)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("schedule", "weights"),
    [("stale", "newest"), ("pipedream", "stash"), ("spectrain", "predict"), ("stale", "recompute")],
)
def test_asynchronous_schedules_over_grids(comm, schedule, weights):
    grids = {3: [None, {"c": 2}], 4: [{"c": 2}, {"h": 2}]}[comm.size]
    make = segmentation if weights != "recompute" else out_of_place
    assert_as_one_process(comm, make, images(7), schedule, 1, grids, weights=weights)


def out_of_place(count):
    stages = segmentation(count)
    for module in Chain(stages).modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return stages


@pytest.mark.ranks(2, 3)
def test_deferred_statistics_over_grids(comm):
    data = images(2)
    grids = {2: [{"h": 2}], 3: [{"n": 2}, None]}[comm.size]
    found = train(comm, segmentation(len(grids)), data, "gpipe", 2, plans=grids, batch_norm="deferred")[1]
    one = comm.Split(comm.rank)
    alone = train(one, [Chain(segmentation(len(grids)))], data, "gpipe", 2, batch_norm="deferred")[1]
    assert_close(found, list(alone[0].stages))
    one.Free()


class Several(nn.Module):
    """Returns an image, a mask (bool), features (N, C) and a scalar."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x):
        y = self.layer(x)
        return y, x > 0, y.mean((2, 3)), y.mean()


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, y, mask, features, scale):
        return (self.layer(y) * mask[:, :1]).mean((2, 3)) * scale + features[:, :3]


def several(_):
    torch.manual_seed(0)
    return [Several().double(), Joined().double()]


def decoder(_):
    """Features (N, C) become images in the second stage."""
    torch.manual_seed(0)
    layers = nn.ConvTranspose2d(3, 2, 2, stride=2), nn.Conv2d(2, 3, 3, padding=1)
    image = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), *layers)
    return [nn.Linear(6, 12).double(), image.double()]


def with_dropout(_):
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
    return [nn.Sequential(first, nn.Dropout(0.5)).double(), nn.Sequential(nn.Dropout2d(0.3), second).double()]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("grids", [[{"h": 2}, None], [None, {"w": 2}], [{"n": 2}, None]], ids=label)
def test_tensors_of_any_dimensions_cross_between_grids(comm, grids):
    data = [(x, y[:, 0, 0]) for x, y in images(2)]
    assert_as_one_process(comm, several, data, "gpipe", 2, grids)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("grids", [[None, {"h": 2}], [None, {"c": 2}], [{"c": 2}, None]], ids=label)
def test_features_become_images_on_another_grid(comm, grids):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    data = [(x + step, torch.randint(3, (4, 4, 4), generator=generator)) for step in range(2)]
    assert_as_one_process(comm, decoder, data, "zero-bubble", 2, grids)


@pytest.mark.ranks(3)
def test_micro_batches_of_one_sample_over_two_ranks(comm):
    assert_as_one_process(
        comm, segmentation, images(3, [(3, 7, 6), (1, 5, 6), (2, 4, 4)]), "gpipe", 4, [{"n": 2}, None]
    )


@pytest.mark.ranks(3)
@pytest.mark.parametrize("grids", [[None, {"h": 2}], [{"w": 2}, None]], ids=label)
def test_dropout_over_a_grid_has_the_random_numbers_of_one_process(comm, grids):
    assert_as_one_process(comm, with_dropout, images(4), "stale", 1, grids)

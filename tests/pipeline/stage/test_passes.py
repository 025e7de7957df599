"""Stages of all kinds: complex weights, buffers that a forward pass changes, what a caller passes by mistake."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from distconv.errors import PipelineError, ShapeError
from distconv.pipeline import Action, Pipeline, SerialPipeline, schedule
from distconv.pipeline.stage.passes import Microbatch, Passes
from distconv.pipeline.stage.stage_inputs import Minibatch
from tests.pipeline.training import SGD, Chain, assert_same, batches, convolutions, train_plainly


class Complex(nn.Module):
    """Weights that a forward pass sees through another view, as layers in the frequency domain do."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        dtype = torch.float64 if how == "view_as_complex" else torch.complex128
        shape = (3, 4, 2) if how == "view_as_complex" else (3, 4)
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, x):
        if self.how == "view_as_complex":
            weight = torch.view_as_complex(self.weight)
        elif self.how == "view_as_real":
            weight = torch.view_as_complex(torch.view_as_real(self.weight)[1:].contiguous() * 2)
            weight = torch.cat([self.weight[:1].conj(), weight])
        else:
            weight = self.weight.conj().imag * 1j + self.weight.conj()
        return torch.einsum("nc,ck->nk", x.to(weight.dtype), weight).abs()


@pytest.mark.parametrize("weights", ["newest", "stash", "predict"])
@pytest.mark.parametrize("how", ["conj", "view_as_complex", "view_as_real"])
def test_weights_that_are_seen_through_views_have_the_gradients_of_torch(how, weights):
    torch.manual_seed(2)
    stages = [Complex(how)]
    alone = copy.deepcopy(stages)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 3, generator=generator, dtype=torch.float64), torch.arange(4)) for _ in range(4)]
    pipe = Pipeline(stages, MPI.COMM_SELF, "stale", F.cross_entropy, optimizer=SGD, weights=weights)
    losses = [pipe.step(*batch) for batch in data]
    assert losses == train_plainly(alone, data)
    assert_same(stages, alone)
    pipe.close()


def with_buffers(kind):
    torch.manual_seed(3)
    layers = {
        "spectral norm": lambda: spectral_norm(nn.Conv2d(2, 2, 3, padding=1)),
        "instance norm": lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        "batch norm": lambda: nn.BatchNorm2d(2),
    }[kind]
    head = [nn.Conv2d(2, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)]
    return [nn.Sequential(nn.Conv2d(2, 2, 1), layers()).double(), nn.Sequential(layers(), *head).double()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", ["spectral norm", "instance norm", "batch norm"])
def test_a_forward_that_runs_again_finds_the_buffers_of_the_first_time(comm, kind, microbatches):
    """So recomputing changes no bit."""
    stages = with_buffers(kind)
    alone, serially = copy.deepcopy(stages), copy.deepcopy(stages)
    data = batches(3)
    pipe = Pipeline(stages, comm, "gpipe", F.cross_entropy, microbatches, optimizer=SGD, weights="recompute")
    losses = [pipe.step(*batch) for batch in data]
    pipe.synchronize()
    assert losses == train_plainly(alone, data, microbatches)
    assert_same(stages, alone)
    serial = SerialPipeline(serially, F.cross_entropy, SGD, "gpipe", microbatches, weights="recompute")
    assert [serial.step(*batch) for batch in data] == losses
    assert_same(serially, alone)
    pipe.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["spectral norm", "instance norm"])
def test_replicas_refuse_buffers_in_which_they_would_differ(comm, kind):
    pipe = Pipeline([Chain(with_buffers(kind))], comm, "gpipe", F.cross_entropy, 2, 2, SGD)
    name = "weight.0._u" if kind == "spectral norm" else "running_mean"
    with pytest.raises(PipelineError, match=f"changes the buffer 'stages.0.1.*{name}'; replicas"):
        pipe.step(*batches(1)[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((2, 2)), "contains a ndarray; use tensors"),
        ([1], "is a list without tensors; pass samples as tensors"),
        (None, "is a NoneType without tensors; pass samples as tensors"),
    ],
)
def test_inputs_without_tensors_raise(comm, wrong, words):
    pipe = Pipeline(convolutions(2), comm, "gpipe", F.cross_entropy, optimizer=SGD)
    x, target = batches(1)[0]
    with pytest.raises(ShapeError, match=f"step: x {words}"):
        pipe.step(wrong, target)
    with pytest.raises(ShapeError, match="step: target contains a ndarray; use tensors"):
        pipe.step(x, np.zeros((2, 2)))
    pipe.step(x, target)
    pipe.close()


@pytest.mark.ranks(2)
def test_ranks_need_no_common_seed(comm):
    """Random numbers follow from the first rank's."""
    ends = []
    for other in (0, 5):
        stages = convolutions(2, dropout=0.5)
        torch.manual_seed(7 + other * comm.rank)
        pipe = Pipeline(stages, comm, "gpipe", F.cross_entropy, 2, optimizer=SGD)
        ends.append([pipe.step(*batch) for batch in batches(3)])
        pipe.close()
    assert ends[0] == ends[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [np.int64(2), 10**6])
def test_micro_batches_are_counted_as_whole_numbers_are(comm, count):
    pipe = Pipeline(convolutions(2), comm, "1f1b-sno", F.cross_entropy, count, optimizer=SGD)
    alone = convolutions(2)
    data = batches(2)
    assert [pipe.step(*batch) for batch in data] == train_plainly(alone, data, int(count))
    pipe.close()


@pytest.mark.parametrize("loss", [lambda y, t: 0.5, lambda y, t: y])
def test_a_loss_that_is_not_one_number_is_named(loss):
    pipe = Pipeline(convolutions(1), MPI.COMM_SELF, "gpipe", loss, optimizer=SGD)
    with pytest.raises(TypeError, match="the loss must be a tensor of one element, the mean over samples, not"):
        pipe.step(*batches(1)[0])


def test_a_forward_pass_has_the_weights_of_the_version_that_its_action_names():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    passes = Passes([layer], None, F.mse_loss, 0, replicated=False, deferred=False)
    passes.begin(schedule("pipedream", 2, 4))
    passes.weights.stash(0, 3)
    passes.weights.prepare_update(predicts=False)
    nn.init.constant_(layer.weight, 5.0)
    feed = Microbatch(torch.ones(1, 1), torch.ones(1, 1), 1.0, Minibatch(0, 1), 0)
    found = [passes.forward(Action("F", 0, 2 + version, version=version), feed, None) for version in (1, 0, 1)]
    assert [outputs.tensors[0].item() for outputs in found] == [5, 2, 5]


def test_a_prediction_has_no_graph_and_leaves_nothing_in_flight():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 2), nn.Tanh()]
    passes = Passes(layers, None, F.mse_loss, 0, replicated=False, deferred=False)
    passes.begin(schedule("interleaved", 1, 1, chunks=2))
    x = torch.randn(4, 3, requires_grad=True)
    feed = Microbatch({"input": x}, None, 1.0, Minibatch(0, 4), 0)
    first = passes.predict(Action("F", 0, 0, 0, version=0), feed, None)
    (found,), _ = passes.predict(Action("F", 0, 0, 1, version=0), feed, first)
    assert torch.equal(found, layers[1](layers[0](x))) and not found.requires_grad
    assert passes._states == {}


def test_chunks_of_one_rank_drop_out_each_for_itself():
    """Two factors of a half leave a quarter; the same factor twice leaves a half."""

    def left(y, target):
        return (y != 0).double().mean() + 0 * y.sum()

    pipe = Pipeline([nn.Dropout(), nn.Dropout()], MPI.COMM_SELF, "interleaved", left, chunks=2)
    assert pipe.step(torch.ones(1, 10_000), torch.ones(1)) == pytest.approx(0.25, abs=0.03)
    pipe.close()

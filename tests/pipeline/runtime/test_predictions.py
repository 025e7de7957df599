"""Predictions of a pipeline: outputs of the model in evaluation mode, on all ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.errors import ShapeError
from distconv.pipeline import Pipeline, ScheduleError, schedule, split
from tests.distconv.layouts import normal, raises_everywhere
from tests.pipeline.training import SGD, assert_same, batches, convolutions


def reference(stages, x):
    model = nn.Sequential(*copy.deepcopy(stages)).eval()
    with torch.no_grad():
        return model(x)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["gpipe", "1f1b-so", "zero-bubble", "pipedream", "stale", "interleaved"])
def test_a_prediction_is_the_output_of_the_model_on_all_ranks(comm, name):
    count = comm.size * (2 if name == "interleaved" else 1)
    stages = convolutions(count, dropout=0.5)
    options = {} if name in ("pipedream", "stale") else {"microbatches": 2}
    with Pipeline(stages, comm, name, F.cross_entropy, optimizer=SGD, **options) as pipe:
        for x, target in batches(3):
            pipe.step(x, target)
        pipe.drain()
        pipe.synchronize()
        before = copy.deepcopy(stages)
        for x, _ in batches(2):  # another number of samples and another size
            found = pipe.predict(x)
            assert not found.requires_grad
            assert torch.equal(found, torch.cat([reference(stages, part) for part in x.tensor_split(count_of(pipe))]))
        assert all(module.training for stage in stages for module in stage.modules())
        pipe.synchronize()
        assert_same(stages, before)  # buffers as well
        losses = list(pipe.losses)
        assert pipe.step(*batches(1)[0]) is not None or name in ("pipedream", "stale")
        pipe.drain()
        assert len(pipe.losses) == len(losses) + 1


def count_of(pipe):
    source = pipe._source
    return source.microbatches if source.stream is None else len(pipe._placement.replicas)


@pytest.mark.ranks(3, 4)
def test_replicas_and_grids_predict(comm):
    options = {3: {"replicas": [2, 1]}, 4: {"plans": [{"h": 2}, {"w": 2}]}}[comm.size]
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)).double(), nn.Conv2d(4, 3, 3).double()]
    x = normal(5, 2, 7, 9)
    with Pipeline(stages, comm, "1f1b-so", F.cross_entropy, microbatches=3, **options) as pipe:
        found = pipe.predict(x)
    torch.testing.assert_close(found, reference(convolution_pair(), x), rtol=1e-12, atol=1e-13)
    assert type(found) is torch.Tensor


def convolution_pair():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)).double(), nn.Conv2d(4, 3, 3).double()]


class Outputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, mask=None):
        if self.kind == "nested":
            return {"y": x * 2, "more": (x.sum(1), None, "name"), "shape": x.shape[1]}
        return x.sum() if self.kind == "a sum" else (x, len(x))


@pytest.mark.ranks(2)
def test_nested_outputs_are_concatenated_along_the_samples(comm):
    with Pipeline([nn.Tanh(), Outputs("nested")], comm, "gpipe", F.mse_loss, microbatches=2) as pipe:
        x = normal(5, 3)
        found = pipe.predict(x)
        assert torch.equal(found["y"], x.tanh() * 2) and found["shape"] == 3 and found["more"][1:] == (None, "name")
        torch.testing.assert_close(found["more"][0], x.tanh().sum(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "words"),
    [("a sum", "a tensor without dimensions"), ("another number", "other containers or constants for some")],
)
def test_outputs_that_cannot_be_concatenated_raise_on_all_ranks(comm, kind, words):
    pipe = Pipeline([nn.Tanh(), Outputs(kind)], comm, "gpipe", F.mse_loss, microbatches=2)
    raises_everywhere(comm, ShapeError, words, lambda: pipe.predict(torch.ones(3, 2)))
    pipe.close()


@pytest.mark.ranks(2)
def test_one_micro_batch_may_have_outputs_without_samples(comm):
    with Pipeline([nn.Tanh(), Outputs("a sum")], comm, "gpipe", F.mse_loss) as pipe:
        torch.testing.assert_close(pipe.predict(torch.ones(3, 2)), torch.ones(3, 2).tanh().sum())


@pytest.mark.ranks(2)
def test_recorded_stages_predict_in_evaluation_mode_and_train_afterwards(comm):
    class Mode(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.b(F.dropout(self.a(x), 0.5, self.training))
            return x if self.training else x * 2

    torch.manual_seed(0)
    model = Mode().double()
    x = normal(4, 3)
    expected = model.eval()(x).detach()
    stages = split(model.train(), ["b"], x)
    with Pipeline(stages, comm, "gpipe", F.mse_loss, microbatches=2) as pipe:
        torch.testing.assert_close(pipe.predict(x), expected, rtol=1e-12, atol=1e-14)
        assert model.training and all(stage.training for stage in stages)


@pytest.mark.ranks(2)
def test_mini_batches_in_flight_and_empty_ones_raise(comm):
    pipe = Pipeline(convolutions(2), comm, "stale", F.cross_entropy, optimizer=SGD)
    x, target = batches(1)[0]
    pipe.step(x, target)
    raises_everywhere(comm, ScheduleError, "predict: 1 mini-batches may be in flight", lambda: pipe.predict(x))
    pipe.drain()
    raises_everywhere(comm, ShapeError, r"predict: x \(0, 2\)", lambda: pipe.predict(torch.ones(0, 2)))
    assert pipe.predict(x).shape == (len(x), 3)
    pipe.close()


@pytest.mark.ranks(2)
def test_a_schedule_object_predicts_with_its_number_of_micro_batches(comm):
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3).double(), nn.Tanh()]
    with Pipeline(stages, comm, schedule("1f1b-sno", 2, 3), F.mse_loss) as pipe:
        x = normal(7, 3)
        torch.testing.assert_close(pipe.predict(x), reference(stages, x), rtol=1e-13, atol=0.0)

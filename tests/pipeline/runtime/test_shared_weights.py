"""Parameters that stages on different ranks share: gradients and updates of one process."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.errors import PlanError
from distconv.pipeline import Pipeline, ScheduleError, SerialPipeline, split
from tests.distconv.layouts import normal, raises_everywhere
from tests.pipeline.training import assert_close

ADAM = partial(torch.optim.AdamW, lr=0.02)
WORDS = 11


class LanguageModel(nn.Module):
    """An embedding that is the output layer, too, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.first, self.twice, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.twice(self.first(self.embedding(words)).tanh())
        x = self.norm(self.twice(x))
        return self.head(x).movedim(-1, 1)


class Tied(nn.Module):
    """Convolutions with one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)).tanh())


def sentences(number):
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(WORDS, (5, 8), generator=generator)
    return words[:, :-1], words[:, 1:]


def pictures(number):
    return normal(5, 2, 6, 5, seed=number), normal(5, 2, 6, 5, seed=9 + number)


def train_plainly(model, data, loss, optimizer=ADAM):
    updates = optimizer(list(model.parameters()))
    losses = []
    for x, target in data:
        updates.zero_grad()
        each = loss(model(x), target)
        each.backward()
        updates.step()
        losses.append(each.item())
    return losses


CUTS = {2: ["norm"], 3: ["first", "norm"], 4: ["first", "norm", "head"]}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("schedule", ["1f1b-so", "gpipe", "zero-bubble"])
def test_a_tied_embedding_trains_as_in_one_process(comm, schedule):
    torch.manual_seed(0)
    model = LanguageModel().double()
    alone, data = copy.deepcopy(model), [sentences(number) for number in range(4)]
    stages = split(model, CUTS[comm.size], data[0][0])
    assert len(stages) == comm.size
    with Pipeline(stages, comm, schedule, F.cross_entropy, microbatches=2, optimizer=ADAM) as pipe:
        losses = [pipe.step(*batch) for batch in data]
        gradients = comm.allgather([p.grad for p in stages[pipe.stage].parameters() if len(p) == WORDS])
        pipe.synchronize()
    torch.testing.assert_close(losses, train_plainly(alone, data, F.cross_entropy), rtol=1e-11, atol=0.0)
    assert_close([model], [alone])
    for each in (gradient for of_rank in gradients for gradient in of_rank):  # on all stages that use it
        torch.testing.assert_close(each, alone.embedding.weight.grad, rtol=1e-9, atol=1e-12)
    # One optimizer has the parameter, whose state a checkpoint would otherwise have twice.
    owned = [p for group in (pipe.optimizer.param_groups if pipe.optimizer else []) for p in group["params"]]
    assert comm.allreduce(sum(p is model.embedding.weight for p in owned)) == 1


@pytest.mark.ranks(2, 3, 4)
def test_replicas_and_grids_of_stages_share_weights(comm):
    torch.manual_seed(0)
    model = Tied().double()
    alone, data = copy.deepcopy(model), [pictures(number) for number in range(3)]
    options = {2: {}, 3: {"replicas": [1, 2]}, 4: {"plans": [{"h": 3}, None]}}[comm.size]
    stages = split(model, ["c"])
    with Pipeline(stages, comm, "1f1b-so", F.mse_loss, microbatches=3, optimizer=ADAM, **options) as pipe:
        losses = [pipe.step(*batch) for batch in data]
        pipe.synchronize()
    torch.testing.assert_close(losses, train_plainly(alone, data, F.mse_loss), rtol=1e-11, atol=0.0)
    assert_close([model], [alone])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_shared_weight_may_be_frozen_or_without_a_gradient_on_one_stage(comm, frozen):
    torch.manual_seed(0)
    one, other = nn.Linear(3, 3, bias=False).double(), nn.Linear(3, 3).double()
    one.requires_grad_(not frozen)

    class Holds(nn.Module):  # has the weight, and does not use it
        def __init__(self):
            super().__init__()
            self.kept, self.other = one, other

        def forward(self, x):
            return self.other(x)

    stages = [nn.Sequential(one), Holds()]
    alone = nn.Sequential(*copy.deepcopy(stages))
    data = [(normal(4, 3, seed=number), normal(4, 3, seed=9 + number)) for number in range(3)]
    with Pipeline(stages, comm, "gpipe", F.mse_loss, microbatches=2, optimizer=ADAM) as pipe:
        losses = [pipe.step(*batch) for batch in data]
        pipe.synchronize()
    torch.testing.assert_close(losses, train_plainly(alone, data, F.mse_loss), rtol=1e-11, atol=0.0)
    assert_close(stages, [alone[0], alone[1]])


def test_the_serial_pipeline_updates_a_shared_weight_once():
    torch.manual_seed(0)
    model = LanguageModel().double()
    alone, data = copy.deepcopy(model), [sentences(number) for number in range(4)]
    pipe = SerialPipeline(split(model, CUTS[4], data[0][0]), F.cross_entropy, ADAM, "gpipe", 2)
    losses = [pipe.step(*batch) for batch in data]
    torch.testing.assert_close(losses, train_plainly(alone, data, F.cross_entropy), rtol=1e-11, atol=0.0)
    assert_close([model], [alone])
    with pytest.raises(ScheduleError, match="stages share parameters"):
        SerialPipeline(split(model, CUTS[4], data[0][0]), F.cross_entropy, ADAM, "stale")


@pytest.mark.ranks(2)
def test_asynchronous_schedules_and_plans_that_split_a_shared_weight_raise(comm):
    torch.manual_seed(0)
    stages = split(Tied(), ["c"])
    words = r"0\.a\.weight and 1\.c\.weight are one tensor, which pipedream would update on each stage at another time"
    raises_everywhere(comm, ScheduleError, words, lambda: Pipeline(stages, comm, "pipedream", F.mse_loss))
    pipe = Pipeline(stages, comm, "gpipe", F.mse_loss)
    raises_everywhere(comm, ScheduleError, words, lambda: pipe.switch("pipedream"))
    assert pipe.step(*(value.float() for value in pictures(0))) is not None
    pipe.close()


@pytest.mark.ranks(3)
def test_a_plan_that_splits_a_shared_weight_raises(comm):
    torch.manual_seed(0)
    stages = split(Tied(), ["c"])
    words = r"stages \[0, 1\] share 0\.a\.weight, which a plan splits over ranks"
    plans = [{"c": 2}, None]
    raises_everywhere(comm, PlanError, words, lambda: Pipeline(stages, comm, "gpipe", F.mse_loss, plans=plans))

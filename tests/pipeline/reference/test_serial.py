"""The serial pipeline against weights and gradients derived one by one from the definition of each policy."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.layers.models import MODELS
from distconv.pipeline import ScheduleError
from distconv.pipeline.reference.serial import SYNCHRONOUS, WEIGHTS, SerialPipeline
from distconv.pipeline.splitting.split import split
from distconv.pipeline.stage.rng import seed_generators
from tests.pipeline.reference.definition import MOMENTUM, RATE, WIDTH, Definition, in_flight

SGD = partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM)
PLAIN_SGD = partial(torch.optim.SGD, lr=RATE)
STILL = partial(torch.optim.SGD, lr=0.0)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def two_layers():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def samples(count, shape=(WIDTH,), batch=4):
    return [(torch.randn(batch, *shape), torch.randn(batch, WIDTH)) for _ in range(count)]


def images(count, batch=4, size=9):
    return [(torch.randn(batch, 3, size, size), torch.randint(10, (batch,))) for _ in range(count)]


def resnet(width=2):
    return MODELS["resnet20"](width=width)


def assert_equals_definition(count, schedule, weights, vertical_sync=False):
    stages = [two_layers() for _ in range(count)]
    batches = samples(4 * count + 3)
    expected = Definition(stages, batches, schedule, weights, vertical_sync)
    pipe = SerialPipeline(stages, F.mse_loss, SGD, schedule, weights=weights, vertical_sync=vertical_sync)
    for m, batch in enumerate(batches):
        pipe.step(*batch)
        for k, stage in enumerate(stages):
            torch.testing.assert_close(
                [p.detach() for p in stage.parameters()],
                expected.version(k, max(0, m + 2 - in_flight(schedule, count, k))),
                rtol=1e-12,
                atol=1e-12,
            )
    pipe.drain()
    for k, stage in enumerate(stages):
        torch.testing.assert_close(
            [p.detach() for p in stage.parameters()], expected.version(k, len(batches)), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("pairs", [1, 4])
def test_stale_weights_follow_their_definition(pairs, weights):
    assert_equals_definition(pairs + 1, "stale", weights)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("schedule", ["pipedream", "spectrain"])
@pytest.mark.parametrize("stages", [1, 5])
def test_one_forward_one_backward_follows_its_definition(stages, schedule, weights):
    assert_equals_definition(stages, schedule, weights)


@pytest.mark.parametrize("schedule", ["pipedream", "stale"])
@pytest.mark.parametrize("stages", [2, 5])
def test_vertical_sync_uses_one_version_on_all_stages(stages, schedule):
    assert_equals_definition(stages, schedule, "stash", vertical_sync=True)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("cuts", [[7], list(range(1, 20))])
def test_weights_that_do_not_move_give_the_gradients_of_the_model(cuts, weights):
    model = resnet()
    alone, batches = copy.deepcopy(model), images(2)
    pipe = SerialPipeline(split(model, cuts), F.cross_entropy, STILL, weights=weights)
    for batch in batches:
        pipe.step(*batch)
    pipe.drain()
    for x, target in batches:
        alone.zero_grad()
        F.cross_entropy(alone(x), target).backward()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    for found, expected in zip(model.buffers(), alone.buffers(), strict=True):
        assert torch.equal(found, expected)


def grouped_adamw(parameters):
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


OPTIMIZERS = {"sgd": SGD, "adam": partial(torch.optim.Adam, lr=0.01), "adamw": grouped_adamw}


def train_alone(model, optimizer, batches):
    updates, losses = optimizer(list(model.parameters())), []
    for x, target in batches:
        updates.zero_grad()
        value = F.cross_entropy(model(x), target)
        value.backward()
        updates.step()
        losses.append(value.item())
    return losses


def assert_same_state(found, expected):
    differ = [name for name, t in expected.state_dict().items() if not torch.equal(found.state_dict()[name], t)]
    assert differ == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["stale", "pipedream", "spectrain", "gpipe"])
def test_one_stage_is_training_without_a_pipeline(schedule, optimizer):
    model, batches = resnet(), images(4)
    alone = copy.deepcopy(model)
    pipe = SerialPipeline([model], F.cross_entropy, OPTIMIZERS[optimizer], schedule)
    losses = [pipe.step(*batch) for batch in batches]
    assert losses == train_alone(alone, OPTIMIZERS[optimizer], batches)
    assert pipe.losses == list(enumerate(losses))
    assert_same_state(model, alone)


@pytest.mark.parametrize("weights", [None, "recompute"])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_synchronous_schedule_is_training_without_a_pipeline(schedule, weights):
    model, batches = resnet(), images(3)
    alone = copy.deepcopy(model)
    pipe = SerialPipeline(split(model, [3, 4, 13]), F.cross_entropy, SGD, schedule, weights=weights)
    losses = [pipe.step(*batch) for batch in batches]
    assert losses == train_alone(alone, SGD, batches)
    assert_same_state(model, alone)


@pytest.mark.parametrize(("count", "sizes"), [(3, [3, 2, 2]), (7, [1] * 7), (9, [1] * 7), (1, [7])])
def test_micro_batches_are_weighted_by_their_sizes(count, sizes):
    model = nn.Sequential(two_layers(), two_layers())
    alone = copy.deepcopy(model)
    (x, target), seen = samples(1, batch=7)[0], []
    pipe = SerialPipeline(list(model), F.mse_loss, STILL, "gpipe", microbatches=count)
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    loss = pipe.step(x, target)
    expected = F.mse_loss(alone(x), target)
    expected.backward()
    assert seen == sizes
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def test_after_a_switch_training_goes_on_from_the_weights_there_are():
    model, batches = resnet(), images(8)
    pipe = SerialPipeline(split(model, [3, 13]), F.cross_entropy, PLAIN_SGD, "stale")
    for batch in batches[:5]:
        pipe.step(*batch)
    pipe.switch("gpipe")
    alone = copy.deepcopy(model)
    for batch in batches[5:]:
        pipe.step(*batch)
    losses = train_alone(alone, PLAIN_SGD, batches[5:])
    assert pipe.losses[5:] == list(zip(range(5, 8), losses, strict=True))
    assert_same_state(model, alone)


def test_after_a_drain_the_pipeline_begins_anew():
    first = [two_layers() for _ in range(3)]
    pipe = SerialPipeline(first, F.mse_loss, PLAIN_SGD, "spectrain")
    batches = samples(9)
    for batch in batches[:5]:
        pipe.step(*batch)
    pipe.drain()
    second = copy.deepcopy(first)
    fresh = SerialPipeline(second, F.mse_loss, PLAIN_SGD, "spectrain")
    for batch in batches[5:]:
        assert pipe.step(*batch) == fresh.step(*batch)
    pipe.drain()
    fresh.drain()
    assert [loss for _, loss in pipe.losses[5:]] == [loss for _, loss in fresh.losses]
    assert [minibatch for minibatch, _ in pipe.losses] == list(range(9))


def dropping(rate=0.5):
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rate)) for _ in range(3)]


def test_a_second_forward_drops_out_the_same():
    stages, batches, gradients = dropping(), samples(3), []
    for weights in ("newest", "recompute"):
        torch.manual_seed(3)
        modules = copy.deepcopy(stages)
        pipe = SerialPipeline(modules, F.mse_loss, STILL, weights=weights)
        for batch in batches:
            pipe.step(*batch)
        pipe.drain()
        gradients.append([p.grad for module in modules for p in module.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "gpip"}, "schedule='gpip': choose from gpipe, .*stale"),
        ({"weights": "old"}, "weights='old': choose from newest, stash, recompute, predict"),
        ({"schedule": "gpipe", "weights": "stash"}, "weights='stash': gpipe has one version"),
        ({"vertical_sync": True}, r"vertical_sync requires weights='stash'.*'newest'"),
        ({"microbatches": 2}, "microbatches=2: stale takes 1: it updates after every mini-batch"),
        ({"schedule": "gpipe", "microbatches": 0}, "microbatches=0: gpipe takes 1 or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ScheduleError, match=message):
        SerialPipeline([two_layers()], F.mse_loss, SGD, **options)


def test_a_switch_that_is_refused_changes_nothing():
    pipe = SerialPipeline([two_layers(), two_layers()], F.mse_loss, SGD)
    pipe.step(*samples(1)[0])
    with pytest.raises(ScheduleError, match="choose from"):
        pipe.switch("other")
    assert pipe.losses == []


class Drawing(nn.Module):
    """Notes the random number that its forward draws."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        self.drawn.append(torch.rand(1).item())
        return x


def test_each_forward_draws_the_numbers_of_its_mini_batch_micro_batch_and_stage():
    stages = [nn.Sequential(Drawing(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    pipe = SerialPipeline(stages, F.mse_loss, SGD, "stale")
    batches = samples(4)
    for batch in batches[:2]:
        pipe.step(*batch)
    pipe.switch("gpipe", microbatches=2)
    for batch in batches[2:]:
        pipe.step(*batch)
    for stage, module in enumerate(stages):
        expected = []
        for minibatch, microbatch in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)):
            with seed_generators(torch.initial_seed(), minibatch, microbatch, stage):
                expected.append(torch.rand(1).item())
        assert module[0].drawn == expected

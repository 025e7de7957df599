"""Optimizers, dtypes, memory formats and traces."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.errors import CommunicatorError
from distconv.pipeline import Pipeline, SerialPipeline, schedule, simulate
from tests.pipeline.training import (
    SGD,
    assert_same,
    assert_trains_as_one_process,
    batches,
    convolutions,
    copies,
    train_plainly,
)

OPTIMIZERS = {
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_in_one_process(comm, name):
    for schedule_name in ("1f1b-so", "stale", "spectrain"):
        assert_trains_as_one_process(comm, convolutions(2), batches(6), schedule_name, optimizer=OPTIMIZERS[name])


@pytest.mark.ranks(2)
def test_a_pipeline_is_closed_at_the_end_of_its_block_but_not_after_a_failure(comm):
    x, target = batches(1)[0]
    with Pipeline(convolutions(2), comm, "gpipe", F.cross_entropy) as pipe:
        pipe.step(x, target)
    with pytest.raises(CommunicatorError, match="freed"):
        pipe.step(x, target)
    with (
        pytest.raises(RuntimeError, match="mine"),
        Pipeline(convolutions(2), comm, "gpipe", F.cross_entropy) as pipe,
    ):
        raise RuntimeError("mine")
    assert pipe.step(x, target) is not None
    pipe.close()


@pytest.mark.ranks(3)
def test_a_learning_rate_schedule_works_on_the_optimizer_of_each_rank(comm):
    stages, data = convolutions(3), batches(5)
    alone = copies(stages)
    pipe = Pipeline(stages, comm, "gpipe", F.cross_entropy, 2, optimizer=SGD)
    rates = [torch.optim.lr_scheduler.ExponentialLR(pipe.optimizer, 0.5)] if pipe.optimizer else []
    for batch in data:
        pipe.step(*batch)
        for each in rates:
            each.step()
    plain = SGD([p for stage in alone for p in stage.parameters()])
    plain_rate = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    for batch in data:
        train_plainly(alone, [batch], 2, optimizer=lambda _: plain)
        plain_rate.step()
    pipe.synchronize()
    assert_same(stages, alone)
    pipe.close()


@pytest.mark.ranks(2)
def test_without_an_optimizer_nothing_is_trained(comm):
    for name in ("gpipe", "stale"):
        stages = [stage.eval() for stage in convolutions(2)]
        before = copies(stages)
        pipe = Pipeline(stages, comm, name, F.cross_entropy)
        losses = [pipe.step(*batches(1)[0]) for _ in range(4)]
        pipe.drain()
        assert losses[-1] is not None
        assert len({loss for _, loss in pipe.losses}) == 1
        pipe.synchronize()
        assert_same(stages, before)
        pipe.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_has_the_bits_of_one_process(comm, dtype):
    data = [(x.to(dtype), target) for x, target in batches(3)]
    for name in ("gpipe", "zero-bubble", "stale"):
        stages = [stage.to(dtype) for stage in convolutions(comm.size)]
        assert_trains_as_one_process(comm, stages, data, name, 1 if name == "stale" else 2)


class Tokens(nn.Module):
    """Pixels as a sequence: a transposed view, (N, H W, C)."""

    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class Pixels(nn.Module):
    def forward(self, x):
        return x.mean(1)


def strides_entering(stages):
    """The strides of what each stage is called with from now on."""
    seen = [[] for _ in stages]
    for stage, each in zip(stages, seen, strict=True):
        stage.register_forward_pre_hook(lambda module, inputs, each=each: each.append(inputs[0].stride()))
    return seen


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_of_a_tensor_survives_a_cut(comm, dtype, memory_format):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 24, 3), Tokens())
    third = nn.Sequential(nn.Linear(24, 17), nn.Tanh(), Pixels(), nn.Linear(17, 3))
    stages = [first, second, third] if comm.size == 3 else [first, nn.Sequential(second, third)]
    stages = [stage.to(dtype).to(memory_format=memory_format) for stage in stages]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 16, 16, generator=generator, dtype=dtype).to(memory_format=memory_format)
    data = [(x + number, torch.tensor([0, 1, 2, 0])) for number in range(3)]
    for name, microbatches in (("gpipe", 2), ("stale", 1)):
        over_ranks, alone = copies(stages), copies(stages)
        found, expected = strides_entering(over_ranks), strides_entering(alone)
        pipe = Pipeline(over_ranks, comm, name, F.cross_entropy, microbatches, optimizer=SGD)
        serial = SerialPipeline(alone, F.cross_entropy, SGD, name, microbatches)
        assert [pipe.step(*batch) for batch in data] == [serial.step(*batch) for batch in data]
        pipe.drain()
        serial.drain()
        pipe.synchronize()
        assert_same(over_ranks, alone)
        assert found[pipe.stage] == expected[pipe.stage]
        pipe.close()
        if name == "gpipe":
            plainly = copies(stages)
            train_plainly(plainly, data, microbatches)
            assert_same(over_ranks, plainly)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["gpipe", "zero-bubble", "interleaved", "pipedream"])
def test_a_trace_has_every_pass_once_in_the_format_of_a_simulation(comm, tmp_path, name):
    microbatches = 1 if name == "pipedream" else 4
    chunks = 2 if name == "interleaved" else 1
    pipe = Pipeline(convolutions(comm.size * chunks), comm, name, F.cross_entropy, microbatches, optimizer=SGD)
    data = batches(4, [(5, 4, 4)])
    pipe.step(*data[0])
    pipe.drain()
    with pipe.traced() as timeline:
        for batch in data if name == "pipedream" else data[:1]:
            pipe.step(*batch)
        pipe.drain()
    pipe.step(*data[0])
    measured, made = timeline(), schedule(name, comm.size, 4)
    simulated = simulate(made, 1.0, 2.0)
    assert sorted(map(passed, measured.spans)) == sorted(map(passed, simulated.spans))
    assert all(0 <= span.start <= span.end <= measured.makespan for span in measured.spans)
    assert 0 <= measured.bubble < 1
    events = []
    for number, each in enumerate((measured, simulated)):
        each.to_chrome_trace(tmp_path / f"{number}.json")
        events.append(json.loads((tmp_path / f"{number}.json").read_text())["traceEvents"])
    one, two = ({tuple(sorted(event)) for event in each} for each in events)
    assert one == two
    assert {(e["name"], e["pid"]) for e in events[0]} == {(e["name"], e["pid"]) for e in events[1]}
    pipe.close()


def passed(span):
    return str(span.action.kind), span.action.stage, str(span.action.microbatch), span.action.chunk, span.replica

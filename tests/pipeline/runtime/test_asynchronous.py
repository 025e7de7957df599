"""Asynchronous schedules over ranks: the bits of the serial pipeline, whatever the policy, and hybrids of several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from distconv.pipeline import Pipeline, SerialPipeline
from distconv.pipeline.schedules.actions import ScheduleError
from tests.pipeline.training import SGD, assert_same, batches, convolutions, copies, label

SCHEDULES = ("pipedream", "spectrain", "stale")
WEIGHTS = ("stash", "newest", "predict", "recompute")
POLICIES = [
    *((schedule, {"weights": weights}) for schedule in SCHEDULES for weights in WEIGHTS),
    *((schedule, {}) for schedule in SCHEDULES),
    ("pipedream", {"vertical_sync": True}),
]


def make_pair(comm, schedule, microbatches=1, **options):
    """A pipeline over ranks and one in this process, of the same stages, and both lists of stages."""
    stages = convolutions(comm.size, dropout=0.3)
    alone = copies(stages)
    torch.manual_seed(7)
    pipe = Pipeline(stages, comm, schedule, F.cross_entropy, microbatches, optimizer=SGD, **options)
    serial = SerialPipeline(alone, F.cross_entropy, SGD, schedule, microbatches, **options)
    return pipe, serial, stages, alone


def assert_equal_so_far(pipe, serial, stages, alone):
    """Without anything under way."""
    assert pipe.losses == serial.losses
    pipe.synchronize()
    assert_same(stages, alone)


def train_both(pipe, serial, data):
    """Train both; the losses that each step returns are the same."""
    assert [pipe.step(*batch) for batch in data] == [serial.step(*batch) for batch in data]


def drain_both(pipe, serial):
    pipe.drain()
    serial.drain()


@pytest.mark.ranks(at_most=6)
@pytest.mark.parametrize(("schedule", "options"), POLICIES, ids=label)
def test_training_has_the_bits_of_the_serial_pipeline(comm, schedule, options):
    pipe, serial, *models = make_pair(comm, schedule, **options)
    data = batches(3 * comm.size + 4)  # long enough for the schedule to repeat itself
    train_both(pipe, serial, data[:-4])
    drain_both(pipe, serial)
    assert_equal_so_far(pipe, serial, *models)
    train_both(pipe, serial, data[-4:])
    drain_both(pipe, serial)
    assert_equal_so_far(pipe, serial, *models)
    pipe.close()


@pytest.mark.ranks(3)
def test_every_rank_gets_the_same_losses(comm):
    for schedule in SCHEDULES:
        pipe, *_ = make_pair(comm, schedule)
        returned = [pipe.step(*batch) for batch in batches(9)]
        pipe.drain()
        told = comm.allgather((returned, pipe.losses))
        assert all(each == told[0] for each in told)
        assert returned[0] is None
        assert [number for number, _ in pipe.losses] == list(range(9))
        pipe.close()


@pytest.mark.long
@pytest.mark.ranks(1, 3)
def test_draining_after_any_number_of_steps_has_the_bits_of_the_serial_pipeline(comm):
    for schedule in SCHEDULES:
        pipe, serial, *models = make_pair(comm, schedule)
        data = iter(batches(40))
        for steps in (0, 1, 2, 3, 4, 0, 6, 9):
            train_both(pipe, serial, [next(data) for _ in range(steps)])
            drain_both(pipe, serial)
            assert_equal_so_far(pipe, serial, *models)
        pipe.close()


@pytest.mark.ranks(2, 3, 4)
def test_switching_there_and_back_has_the_bits_of_the_serial_pipeline(comm):
    pipe, serial, *models = make_pair(comm, "stale")
    data = batches(30)
    for number, (schedule, microbatches, options) in enumerate([
        ("gpipe", 3, {}),
        ("stale", 1, {}),
        ("pipedream", 1, {"vertical_sync": True}),
        ("zero-bubble", 2, {}),
        ("spectrain", 1, {"weights": "newest"}),
    ]):  # fmt: skip
        train_both(pipe, serial, data[5 * number : 5 * number + 5])
        for each in (pipe, serial):
            each.switch(schedule, microbatches, **options)
        assert_equal_so_far(pipe, serial, *models)
    train_both(pipe, serial, data[25:])
    drain_both(pipe, serial)
    assert_equal_so_far(pipe, serial, *models)
    pipe.close()


@pytest.mark.ranks(2)
def test_a_refused_switch_changes_nothing(comm):
    pipe, serial, *models = make_pair(comm, "stale")
    train_both(pipe, serial, batches(2))
    for refused in (("pipedream", 3), ("no such", 1), ("fbp-as", 2), ("interleaved", 2), ("gpipe", 0)):
        with pytest.raises(ScheduleError):
            pipe.switch(*refused)
    train_both(pipe, serial, batches(4))
    drain_both(pipe, serial)
    assert_equal_so_far(pipe, serial, *models)
    pipe.close()


@pytest.mark.ranks(2)
def test_the_model_is_not_brought_together_while_mini_batches_are_under_way(comm):
    pipe, *_ = make_pair(comm, "stale")
    pipe.step(*batches(1)[0])
    with pytest.raises(ScheduleError, match="drain"):
        pipe.synchronize()
    pipe.close()

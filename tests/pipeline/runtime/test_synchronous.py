"""Synchronous schedules over ranks: the bits of a plain loop over micro-batches in one process."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from distconv.pipeline import Pipeline
from tests.pipeline.training import SGD, assert_same, batches, convolutions, copies, label, train_plainly

SCHEDULES = [
    ("gpipe", {}),
    ("1f1b-sno", {}),
    ("1f1b-so", {}),
    ("1f1b-as", {}),
    ("interleaved", {"chunks": 2}),
    ("interleaved", {"chunks": 3}),
    ("zero-bubble", {}),
    ("gpipe", {"weights": "recompute"}),
    ("1f1b-so", {"weights": "recompute"}),
    ("interleaved", {"chunks": 2, "weights": "recompute"}),
    ("zero-bubble", {"weights": "recompute"}),
]


@pytest.mark.ranks(at_most=6)
@pytest.mark.parametrize(("schedule", "options"), SCHEDULES, ids=label)
def test_training_has_the_bits_of_one_process(comm, schedule, options):
    stages = convolutions(comm.size * options.get("chunks", 1))
    alone, data = copies(stages), batches(6)
    pipe = Pipeline(stages, comm, schedule, F.cross_entropy, optimizer=SGD, **options)
    expected, losses = [], []
    optimizer = SGD([parameter for stage in alone for parameter in stage.parameters()])
    # Micro-batches: one; fewer than stages of 4 and 6 ranks; more than samples. Batches do not divide, and change.
    for microbatches, some in ((1, data[:2]), (3, data[2:4]), (8, data[4:])):
        pipe.switch(schedule, microbatches, **options)
        losses += [pipe.step(x, target) for x, target in some]
        expected += train_plainly(alone, some, microbatches, optimizer=lambda _: optimizer)
    assert losses == expected
    assert pipe.losses == list(enumerate(expected))
    pipe.synchronize()
    assert_same(stages, alone)
    pipe.close()

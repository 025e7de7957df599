"""Batches of sequences over a grid, and bitstreams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.jobs.sequence import samples as module
from distconv.jobs.sequence.bitstreams import Bitstreams, counting_accuracy
from distconv.jobs.sequence.mfcc import CoefficientRecipe
from distconv.jobs.sequence.samples import SequenceLoader, SequenceSamples
from tests.distconv.layouts import grid_over, grids, raises_everywhere


class Unequal:
    """Sequences of lengths 1, 2, ..., whose values tell their number."""

    labels = np.arange(7)

    def __getitem__(self, index):
        return np.full((1 + index, 2), index + 1, np.float32)


def loader(comm, grid, **options):
    source = SequenceSamples(None, comm, length=5, recipe=CoefficientRecipe())
    source.groups = {"train": Unequal()}
    return SequenceLoader(source, "train", grid, options.pop("batch", 3), dtype=torch.float64, **options)


def test_batches_do_not_depend_on_the_grid(comm):
    for grid in grids(comm, "nw"):
        found = list(loader(comm, grid, shuffle=True, seed=3).epoch(1))
        order = np.random.default_rng((3, 0, 1)).permutation(7)
        assert [batch.samples for batch in found] == [tuple(order[i : i + 3]) for i in (0, 3, 6)]
        for batch in found:
            x, labels = (dc.gather(tensor) for tensor in batch.tensors)
            assert labels.tolist() == list(batch.samples)
            assert x.shape == (len(labels), 1 + max(batch.samples), 3)
            assert torch.equal(x[..., 0].amax(1), labels.double() + 1)
            assert torch.equal((x[..., 2] * torch.arange(1, x.shape[1] + 1)).sum(1), labels.double() + 1)


def test_an_epoch_goes_on_where_it_was_left(comm):
    one = loader(comm, grid_over(comm, n=comm.size), shuffle=True, drop_last=True)
    assert one.steps == 2
    assert [b.samples for b in one.epoch(0, 1)] == [b.samples for b in one.epoch(0)][1:]


@pytest.mark.ranks(2)
def test_no_batch_is_refused(comm):
    grid = grid_over(comm, n=2)
    raises_everywhere(
        comm,
        dc.DataError,
        "no batch of 8 can be made of the 7 sequences",
        lambda: loader(comm, grid, batch=8, drop_last=True),
    )


def test_bits_follow_from_group_and_index():
    found = [
        "".join(map(str, Bitstreams(20, 12, group)[index][:, 0].astype(int)))
        for group, index in ((0, 5), (1, 5), (0, 15))
    ]
    expected = []
    for key in ((0, 5), (1, 5), (0, 15)):
        draws = np.random.default_rng(key).random(12)
        expected.append("".join(str(int(draw < 0.55)) for draw in draws))
    assert found == expected
    assert module.STREAMS == {"train": (2000, 0), "test": (500, 1)} and (module.TRAIN, module.TEST) == (0, 1)


def test_the_nearest_class_of_a_share_of_bits_is_counted(monkeypatch):
    """The fraction 0 gives the smallest class, 0.56 class 5 (not 6), and 1 the largest."""
    shares = (0.0, 0.56, 0.64, 1.0)
    monkeypatch.setattr(Bitstreams, "__getitem__", lambda streams, index: np.full((4, 1), shares[index], np.float32))
    streams = Bitstreams(4, 4)
    streams.labels = np.array([0, 5, 5, 9])
    assert counting_accuracy(streams) == 0.75


def test_sequences_are_padded_with_zeros_and_end_where_they_are_marked():
    found = module.pad_sequences([np.full((1, 2), 5.0, np.float32), np.full((3, 2), 6.0, np.float32)])
    assert found.tolist() == [[[5, 5, 1], [0, 0, 0], [0, 0, 0]], [[6, 6, 0], [6, 6, 0], [6, 6, 1]]]

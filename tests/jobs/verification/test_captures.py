"""Captured against eager: what is different is found, and some random networks are not."""

from __future__ import annotations

import pytest
import torch

from distconv.errors import CaptureError
from distconv.jobs.verification.captures import DIFFERENT, EXACT, REFUSED, UNSUPPORTED, verdict, verdicts


@pytest.mark.ranks(2, 3)
def test_random_networks(comm):
    found = list(verdicts(comm, 17, range(4)))
    assert [number for number, *_ in found] == [0, 1, 2, 3]
    assert EXACT in {what for *_, what, _ in found}
    assert not [each for each in found if each[2] == DIFFERENT]


def training(comm, *, rank, value):
    """Leaves 1, and ``value`` on one rank where steps are captured."""
    return lambda captured: [("loss 3", torch.tensor(value if captured and comm.rank == rank else 1.0))]


@pytest.mark.ranks(1, 2)
def test_a_last_bit_on_one_rank_is_a_difference(comm):
    one_more = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    assert verdict(comm, training(comm, rank=comm.size - 1, value=one_more)) == (DIFFERENT, "loss 3")
    assert verdict(comm, training(comm, rank=0, value=1.0)) == (EXACT, "")
    assert verdict(comm, lambda captured: [("weight", torch.tensor(-0.0 if captured else 0.0))])[0] == DIFFERENT
    assert verdict(comm, lambda captured: [("gradient", None if captured else torch.zeros(1))])[0] == DIFFERENT


@pytest.mark.ranks(1, 2)
def test_what_fails_is_told_apart(comm):
    def raising(error, *, eagerly=False):
        def train(captured):
            if captured or eagerly:
                raise error
            return []

        return train

    assert verdict(comm, raising(CaptureError("item() reads a value")))[0] == REFUSED
    assert verdict(comm, raising(CaptureError("gives other numbers than the eager step")))[0] == DIFFERENT
    assert verdict(comm, raising(ValueError("by capture alone")))[0] == DIFFERENT
    assert verdict(comm, raising(ValueError("eagerly"), eagerly=True))[0] == UNSUPPORTED

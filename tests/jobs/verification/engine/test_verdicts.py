"""What differs, what counts as what, and what a message has to say."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.errors import ShapeError, UnsupportedOperation
from distconv.jobs.verification.engine.verdicts import RankOutcome, Verdict, classify, difference, refusal, suggests_fix
from tests.distconv.layouts import grid_over

EXACT = RankOutcome()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"y": torch.ones(3).double()}, ""),
        ({"y": torch.ones(3).double() + 1e-12}, ""),
        ({"y": torch.ones(3).double() + 1e-9}, "y (3,) differs by 1e-09"),
        ({"y": torch.ones(2).double()}, "y is (2,)"),
        ({"y": torch.ones(3)}, "torch.float32"),
        ({"y": torch.full((3,), torch.nan).double()}, "NaN"),
        ({}, "y is missing"),
        ({"y": torch.ones(3).double(), "dL/dx": torch.ones(1)}, "dL/dx should not be there"),
    ],
)
def test_differences_are_told(found, text):
    told = difference({"y": torch.ones(3).double()}, found)
    assert text in told if text else told == ""


def test_the_tolerance_is_that_of_the_dtype():
    ones = torch.ones(3, dtype=torch.float32)
    assert difference({"y": ones}, {"y": ones + 1e-6}) == ""
    assert "differs by" in difference({"y": ones}, {"y": ones + 1e-4})
    assert difference({"y": ones}, {"y": ones + 1e-4}, condition=100) == ""


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_are_counted_where_they_differ(dtype):
    expected = torch.tensor([0, 1, 1]).to(dtype)
    assert difference({"y": expected}, {"y": expected.clone()}) == ""
    assert difference({"y": expected}, {"y": torch.tensor([1, 1, 0]).to(dtype)}) == "y differs in 2 of 3"


def test_blocks_are_compared_where_they_are(comm):
    grid = grid_over(comm, n=comm.size)
    whole = torch.arange(17.0).double()
    x = dc.scatter(whole, grid)
    assert difference({"y": whole}, {"y": x}) == ""
    x.local.add_(comm.rank == comm.size - 1)
    told = comm.allgather(difference({"y": whole}, {"y": x}))
    assert [bool(text) for text in told] == [rank == comm.size - 1 for rank in range(comm.size)]
    wrong = dc.DistTensor(torch.zeros(19).double(), x.dist, x.shape)
    assert "is a block of (19,) where it should be" in difference({"y": whole}, {"y": wrong})


TORCHS = refusal(RuntimeError("too small"))
OURS = RankOutcome(refusal(ShapeError("too small")))
UNSUPPORTED = RankOutcome(refusal(UnsupportedOperation("no rule; gather it first")))
NO_WAY_OUT = RankOutcome(refusal(UnsupportedOperation("it has no rule")))


@pytest.mark.parametrize(
    ("reference", "outcomes", "verdict"),
    [
        (None, [EXACT, EXACT], Verdict.EXACT),
        (None, [EXACT, RankOutcome(difference="y differs")], Verdict.WRONG),
        (TORCHS, [EXACT, EXACT], Verdict.WRONG),
        (TORCHS, [OURS, OURS], Verdict.REFUSED),
        (TORCHS, [OURS, EXACT], Verdict.WRONG),
        (TORCHS, [RankOutcome(refusal(ShapeError("no")))] * 2, Verdict.OTHER_WORDS),
        (TORCHS, [UNSUPPORTED, UNSUPPORTED], Verdict.RAISES),
        (None, [OURS, OURS], Verdict.UNCLEAR),
        (None, [NO_WAY_OUT, NO_WAY_OUT], Verdict.UNCLEAR),
        (None, [UNSUPPORTED, UNSUPPORTED], Verdict.RAISES),
        (None, [UNSUPPORTED, RankOutcome(refusal(UnsupportedOperation("nor this; gather it")))], Verdict.WRONG),
        (None, [RankOutcome(refusal(KeyError("h")))] * 2, Verdict.UNCLEAR),
        (TORCHS, [RankOutcome(refusal(RuntimeError("too small")))] * 2, Verdict.REFUSED),
    ],
)
def test_verdicts(reference, outcomes, verdict):
    assert classify(reference, outcomes)[0] is verdict


def test_only_what_has_infinities_may_have_nan_elsewhere():
    ones, nan = torch.ones(2).double(), torch.tensor([1.0, torch.nan]).double()
    outcome = RankOutcome(difference=difference({"y": nan}, {"y": ones}))
    assert classify(None, [outcome, EXACT])[0] is Verdict.WRONG
    assert classify(None, [outcome, EXACT], infinite=True)[0] is Verdict.INFINITE
    other = RankOutcome(difference=difference({"y": ones}, {"y": ones * 2}))
    assert classify(None, [other], infinite=True)[0] is Verdict.WRONG


@pytest.mark.parametrize(
    ("text", "helps"),
    [
        ("torch.sort has no distributed rule; gather the tensor first (dc.gather(x)) and apply it to the whole", True),
        ("its channels are split over 'c'; replicate that dimension first", True),
        ("convolution of a plain tensor with a distributed weight: scatter the input first", True),
        ("a recurrent layer has no second derivative. Use method='autograd'.", True),
        ("torch.Tensor.gather has no distributed rule", False),
        ("batch norm needs a distributed input whose channels are not split", False),
    ],
)
def test_a_way_out_is_an_imperative(text, helps):
    assert suggests_fix(text) is helps

"""Differences of results, verdicts, and suggested fixes in messages."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.errors import ShapeError, UnsupportedOperation
from distconv.jobs.verification.engine.verdicts import RankOutcome, Verdict, classify, difference, refusal, suggests_fix
from tests.distconv.layouts import grid_over

EXACT = RankOutcome()


INF, NAN = torch.inf, torch.nan
NOT_FINITE = "y is infinite or NaN where torch's is not, or not where it is"


@pytest.mark.parametrize(
    ("values", "found", "text"),
    [
        ((1, 1, 1), {"y": (1, 1 + 1e-12, 1)}, ""),
        ((1, -4, 1), {"y": (1 + 1e-9, -4, 1 - 2e-9)}, "y (3,) differs by 2e-09 (scale 4) in 2 values"),
        ((1e-5, 0, 0), {"y": (1e-5, 9e-13, 0)}, ""),
        ((1e-5, 0, 0), {"y": (1e-5, 2e-12, 0)}, "y (3,) differs by 2e-12 (scale 0.01) in 1 values"),
        ((INF, NAN, 2), {"y": (INF, NAN, 2 + 1e-12)}, ""),
        ((INF, NAN, 2), {"y": (INF, NAN, 3)}, "y (3,) differs by 1 (scale 2) in 1 values"),
        ((INF, NAN), {"y": (INF, NAN)}, ""),
        ((1, 1), {"y": (1, NAN)}, NOT_FINITE),
        ((INF, NAN), {"y": (-INF, NAN)}, NOT_FINITE),
        ((INF, NAN), {"y": (INF, INF)}, NOT_FINITE),
        ((1 + 2j,), {"y": (1 + 2.1j,)}, "y (1, 2) differs by 0.1 (scale 2) in 1 values"),
        ((1, 1), {"y": (1,)}, "y is (1,) torch.float64, torch has (2,) torch.float64"),
        ((1, 1), {"x": (1,)}, "y is missing"),
        ((1, 1), {"y": (1, 1), "z": (1,), "dL/dx": (1,)}, "dL/dx should not be there"),
    ],
)
def test_the_first_difference_is_described(values, found, text):
    def tensor(values):
        return torch.tensor(values, dtype=torch.complex128 if isinstance(values[0], complex) else torch.float64)

    assert difference({"y": tensor(values)}, {name: tensor(each) for name, each in found.items()}) == text


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_the_tolerance_is_that_of_the_dtype(dtype, limit):
    expected = torch.tensor([0.0, 4.0], dtype=dtype)
    for factor, condition, equal in ((0.9, 1, True), (1.1, 1, False), (9, 10, True), (11, 10, False)):
        actual = torch.tensor([4 * factor * limit, 4.0], dtype=dtype)
        assert (difference({"y": expected}, {"y": actual}, condition) == "") is equal
    assert difference({"y": expected}, {"y": expected.int()}) == f"y is (2,) torch.int32, torch has (2,) {dtype}"


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_are_counted_where_they_differ(dtype):
    expected = torch.tensor([0, 1, 1]).to(dtype)
    assert difference({"y": expected}, {"y": expected.clone()}) == ""
    assert difference({"y": expected}, {"y": torch.tensor([1, 1, 0]).to(dtype)}) == "y differs in 2 of 3"


def test_blocks_are_compared_where_they_are(comm):
    grid = grid_over(comm, n=comm.size)
    matrix = torch.arange(3 * 41.0).view(3, 41).double()
    dealt = dc.scatter(matrix, dc.Distribution(grid, (None, "n"), cyclic={"n": 2}))
    assert difference({"y": matrix}, {"y": dealt}) == ""
    assert bool(difference({"y": matrix.roll(1, 1)}, {"y": dealt}))
    whole = torch.arange(17.0).double()
    x = dc.scatter(whole, grid)
    assert difference({"y": whole}, {"y": x}) == ""
    x.local.add_(comm.rank == comm.size - 1)
    told = comm.allgather(difference({"y": whole}, {"y": x}))
    assert [bool(text) for text in told] == [rank == comm.size - 1 for rank in range(comm.size)]
    wrong = dc.DistTensor(torch.zeros(19).double(), x.dist, x.shape)
    assert "is a block of (19,) where it should be" in difference({"y": whole}, {"y": wrong})


TORCHS = refusal(RuntimeError(" too small \nsecond line"))
OURS = RankOutcome(refusal(ShapeError("it is too small")))
UNSUPPORTED = RankOutcome(refusal(UnsupportedOperation("no rule; gather it first")))
NO_WAY_OUT = RankOutcome(refusal(UnsupportedOperation("it has no rule\nat all")))
DIFFERS, ALSO = RankOutcome(difference="y differs"), RankOutcome(difference="z differs")


@pytest.mark.parametrize(
    ("reference", "outcomes", "verdict", "text"),
    [
        (None, [EXACT, EXACT], Verdict.EXACT, ""),
        (None, [EXACT, DIFFERS, ALSO, DIFFERS], Verdict.WRONG, "rank 1: y differs; rank 2: z differs"),
        (TORCHS, [EXACT, EXACT], Verdict.WRONG, "torch refuses: ' too small \\nsecond line'"),
        (TORCHS, [OURS, OURS], Verdict.REFUSED, "it is too small"),
        (TORCHS, [OURS, EXACT], Verdict.WRONG,
         "ranks differ: rank 0: raises ShapeError: it is too small; rank 1: computes"),
        (TORCHS, [RankOutcome(refusal(ShapeError("no")))] * 2, Verdict.OTHER_WORDS,
         "torch says 'too small', distconv 'no'"),
        (TORCHS, [UNSUPPORTED, UNSUPPORTED], Verdict.RAISES, "no rule; gather it first"),
        (None, [OURS, OURS], Verdict.UNCLEAR, "it is too small"),
        (None, [NO_WAY_OUT, NO_WAY_OUT], Verdict.UNCLEAR, "it has no rule\nat all"),
        (None, [UNSUPPORTED, UNSUPPORTED], Verdict.RAISES, "no rule; gather it first"),
        (None, [UNSUPPORTED, NO_WAY_OUT], Verdict.WRONG,
         "ranks differ: rank 0: raises UnsupportedOperation: no rule; gather it first; "
         "rank 1: raises UnsupportedOperation: it has no rule"),
        (None, [RankOutcome(refusal(KeyError()))] * 2, Verdict.UNCLEAR, "KeyError: "),
        (None, [RankOutcome(refusal(KeyError())), EXACT], Verdict.WRONG,
         "ranks differ: rank 0: raises KeyError: ; rank 1: computes"),
        (TORCHS, [RankOutcome(refusal(RuntimeError("too small")))] * 2, Verdict.REFUSED, "too small"),
        (TORCHS, [RankOutcome(refusal(KeyError("too small")))] * 2, Verdict.UNCLEAR, "KeyError: 'too small'"),
        (refusal(ValueError()), [OURS], Verdict.REFUSED, "it is too small"),
    ],
)  # fmt: skip
def test_verdicts(reference, outcomes, verdict, text):
    assert classify(reference, outcomes) == (verdict, text)


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

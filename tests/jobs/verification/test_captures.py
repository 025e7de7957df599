"""Random networks with captured steps: exact or refused, and what is different is found."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from mpi4py import MPI

from distconv import cli
from distconv.capture.replay_code import ReplayCode
from distconv.jobs.verification import captures
from distconv.jobs.verification.captures import DIFFERENT, EXACT, REFUSED, UNSUPPORTED, draw_case, verdict, verdicts
from tests.distconv.layouts import grid_over
from tests.jobs.approved import assert_approved, size_of


@pytest.fixture(autouse=True)
def _with_fallback(fallback):
    """Blocks of a network may be computed whole, as users have it."""


@pytest.mark.long
@pytest.mark.ranks(1, 3)
def test_random_networks_are_exact_or_refused(comm):
    found = Counter(what for _, _, what, _ in verdicts(comm, 3, range(6)))
    assert found[EXACT] >= 4 and not found[DIFFERENT]


def test_a_replay_that_goes_wrong_later_is_found(comm, monkeypatch):
    """Past the comparison of the first replay: in the third, by one bit of one output on one rank."""
    compiled, calls = ReplayCode._compile, [0]

    def wrong(program, gradients):
        source, replay = compiled(program, gradients)

        def call(*given):
            calls[0] += 1
            first, *rest = replay(*given)
            if calls[0] == 3 and comm.rank == comm.size - 1:
                first = first + first.abs() * 1e-6
            return first, *rest

        return source, call

    monkeypatch.setattr(ReplayCode, "_compile", wrong)
    case = next(case for case in (draw_case(3, index) for index in range(20)) if case.habits.gradients == "backward")
    what, why = verdict(comm, case.trainer(grid_over(comm, n=comm.size)))
    assert (what, why.partition(" ")[0]) == (DIFFERENT, "loss")


def test_failures_are_told_apart(comm):
    def train(captured, eager=None, replayed=None):
        error = replayed if captured else eager
        if error is not None:
            raise error
        return [("x", torch.ones(2))]

    from distconv.errors import CaptureError

    refused = CaptureError("this step cannot be captured: line 3")
    assert verdict(comm, lambda c: train(c))[0] == EXACT
    assert verdict(comm, lambda c: train(c, replayed=refused))[0] == REFUSED
    assert verdict(comm, lambda c: train(c, replayed=CaptureError("differs from the eager step")))[0] == DIFFERENT
    assert verdict(comm, lambda c: train(c, replayed=ValueError("other")))[0] == DIFFERENT
    assert verdict(comm, lambda c: train(c, eager=ValueError("other")))[0] == UNSUPPORTED
    assert captures.STEPS == 5


def test_tensors_are_the_same_only_bit_for_bit():
    for shape in ((), (0,), (2, 0), (2, 3)):
        ones = torch.ones(shape)
        assert captures._same(ones, ones.clone()) and captures._same(ones * torch.nan, ones * torch.nan)
        assert not captures._same(ones, ones.double()) and not captures._same(ones, torch.ones(*shape, 2))
        assert ones.numel() == 0 or not captures._same(0 * ones, -0.0 * ones)
    assert captures._same(torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]]))


def test_drawn_cases_and_their_training_are_as_approved():
    def described(value):
        return (
            "missing" if value is None else size_of(value) if value.dtype == torch.float64 else str(list(value.shape))
        )

    lines, grid = [], grid_over(MPI.COMM_SELF, n=1)
    for index in range(16):
        case = draw_case(3, index)
        left = dict(case.trainer(grid)(False))
        lines.append(f"{case.text}; {case.loss}; {case.habits}; to none {case.to_none}; {case.network.training}")
        image, last = case.images[-1], list(left)[-1]
        first = f"{image.dtype!s} {size_of(image.double())}, {case.targets[-1].flatten()[:9].tolist()}"
        lines.append(f"    {first}; {len(left)} tensors, {sum(value is None for value in left.values())} missing")
        lines.append(
            "    " + "; ".join(f"{name} {described(left[name])}" for name in ("loss 0", "loss 4", "dL/dx 4", last))
        )
    assert_approved("differential/captures", "\n".join(lines))


def test_the_first_difference_is_named():
    one, two = torch.ones(2), torch.ones(2) * 2
    for other, name in (
        ([("a", one), ("b", None)], ""),
        ([("a", one), ("b", one)], "b"),
        ([("a", two), ("b", one)], "a"),
        ([("a", None), ("b", None)], "a"),
        ([("a", one)], "other tensors"),
    ):
        assert captures._first_difference([("a", one), ("b", None)], other) == name


@pytest.mark.parametrize("different", [0, 1])
def test_the_command_prints_differences_and_the_most_frequent_reasons(monkeypatch, capsys, different):
    found = [(5, "n=1: net", EXACT, ""), (6, "net", REFUSED, "one"), (7, "net", UNSUPPORTED, "two")]
    found += [(8, "net", UNSUPPORTED, "two"), *[(9, "net", DIFFERENT, "loss")] * different]
    asked = []
    monkeypatch.setattr(captures, "verdicts", lambda comm, seed, indices: asked.append((seed, indices)) or found)
    words = ["verify", "capture", "--seed", "4", "--first", "5", "--cases", str(4 + different)]
    assert cli.main(words) == different
    assert asked == [(4, range(5, 9 + different))]
    assert capsys.readouterr().out.splitlines() == ["DIFFERENT: case 9: net: loss"] * different + [
        "2 times unsupported: two",
        "1 times refused: one",
        f"1 ranks, seed 4, 5 steps each: 1 exact, 1 refused, 2 unsupported, {different} DIFFERENT",
    ]
    found[1:] = []
    assert cli.main(["verify", "capture", "--cases", "1"]) == 0
    assert capsys.readouterr().out.startswith("exact: case 5: n=1: net: \n")

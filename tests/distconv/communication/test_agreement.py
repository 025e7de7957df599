"""Agreement: what ranks see differently is known to all of them before anything else happens."""

from __future__ import annotations

import numpy as np
import pytest

import distconv as dc
from distconv.communication import agreement
from tests.distconv.layouts import counting, grid_over, raises_everywhere


def test_ranks_that_agree_go_on(comm):
    agreement.check_same_on_all_ranks(comm, "layer", "conv1")
    assert agreement.try_on_all_ranks(comm, lambda: comm.rank, dc.DataError) == comm.rank


@pytest.mark.ranks(at_least=2)
def test_the_message_says_which_ranks_have_what(comm):
    value = "K=3" if comm.rank == 0 else "K=5"
    text = raises_everywhere(
        comm, dc.MismatchError, "conv1: ranks disagree", lambda: agreement.check_same_on_all_ranks(comm, "conv1", value)
    )
    assert "K=3 on rank 0" in text
    others = ", ".join(map(str, range(1, comm.size)))
    assert f"K=5 on rank{'s' if comm.size > 2 else ''} {others}" in text


@pytest.mark.ranks(2, 3)
def test_of_long_texts_the_message_shows_where_they_differ(comm):
    text = "x" * 5000 + str(comm.rank == 0) + "y" * 5000
    found = raises_everywhere(
        comm, dc.MismatchError, "True", lambda: agreement.check_same_on_all_ranks(comm, "a model", text)
    )
    assert "False" in found
    assert len(found) < 700


@pytest.mark.ranks(at_least=2)
def test_nothing_is_compared_when_checks_are_off(comm, monkeypatch):
    monkeypatch.setattr(agreement, "level", "off")
    agreement.check_same_on_all_ranks(comm, "layer", str(comm.rank))
    assert comm.allreduce(1) == comm.size


@pytest.mark.fault(24)
@pytest.mark.ranks(at_least=2)
def test_at_level_all_each_operator_is_compared(comm, monkeypatch):
    monkeypatch.setattr(agreement, "level", "all")
    x = dc.scatter(counting(6, 2), grid_over(comm, n=comm.size))
    text = raises_everywhere(
        comm, dc.MismatchError, "ranks are at different operations", lambda: x.exp() if comm.rank else x.sin()
    )
    assert "torch.Tensor.exp" in text
    assert "torch.Tensor.sin" in text


FAILURES = (FileNotFoundError, dc.DistconvError, KeyError, IndexError, ValueError, RuntimeError, MemoryError)


def test_a_failure_on_one_rank_is_raised_on_all(comm):
    last = comm.size - 1

    def attempt(failure):
        if comm.rank == last:
            raise failure("mesh.h5 is not here")
        return comm.rank

    match = "mesh.h5 is not here" if comm.size == 1 else rf"mesh.h5 is not here'? \(on rank {last}\)"
    for failure in FAILURES:
        raises_everywhere(
            comm,
            dc.DataError,
            match,
            lambda f=failure: agreement.try_on_all_ranks(comm, lambda: attempt(f), dc.DataError),
        )


@pytest.mark.ranks(at_least=2)
def test_of_several_failures_the_last_ranks_is_told_and_a_rank_may_read_no_more(comm):
    def attempt():
        raise BrokenPipeError("nobody reads") if comm.rank == 0 else ValueError(f"bad row {comm.rank}")

    with pytest.raises(dc.DataError, match=rf"bad row {comm.size - 1} \(on rank {comm.size - 1}\)") as caught:
        agreement.try_on_all_ranks(comm, attempt, dc.DataError)
    assert isinstance(caught.value.__cause__, BrokenPipeError) == (comm.rank == 0)


@pytest.mark.ranks(at_least=2)
def test_what_ranks_find_must_be_alike(comm):
    assert agreement.try_for_same_result(comm, lambda: (1, "a"), dc.DataError, "rows") == (1, "a")
    raises_everywhere(
        comm,
        dc.MismatchError,
        "rows: ranks disagree: 0 on rank 0; 1 on rank 1",
        lambda: agreement.try_for_same_result(comm, lambda: comm.rank, dc.DataError, "rows"),
    )


def test_an_exception_without_a_text_is_named(comm):
    def attempt():
        raise MemoryError

    raises_everywhere(
        comm, dc.DataError, "MemoryError", lambda: agreement.try_on_all_ranks(comm, attempt, dc.DataError)
    )


def test_the_largest_value_is_known_on_all_ranks(comm):
    assert agreement.allreduce_max(comm, -abs(comm.rank - 1), "test") == (0 if comm.size > 1 else -1)
    assert agreement.allreduce_max(comm, 2**40 + comm.rank, "test") == 2**40 + comm.size - 1


def test_what_rank_0_finds_is_known_to_all_ranks(comm):
    assert agreement.try_on_rank_0(comm, lambda: 7 + comm.rank, dc.DataError) == 7


def test_what_fails_on_rank_0_is_raised_on_all_ranks(comm):
    def attempt():
        raise OSError("no such disk")

    raises_everywhere(comm, dc.DataError, "^no such disk", lambda: agreement.try_on_rank_0(comm, attempt, dc.DataError))


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("bit", [0, 31, 40, 62])
def test_numbers_that_differ_in_any_bit_are_found(comm, bit):
    numbers = np.array([5, 2**62 - 1, -(2**40), 7], np.int64)
    numbers[1] -= (1 << bit) >> 1 if comm.rank == comm.size - 1 else 0
    numbers[3] ^= (1 << bit) if comm.rank == 0 else 0
    found = agreement.find_mismatches(comm, numbers, lambda: "the numbers")
    assert found.tolist() == [False, bit > 0, False, True]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", ["plan", "all", "off"])
def test_measured_operations_are_compared_as_later_ones_are(comm, monkeypatch, level: str) -> None:
    monkeypatch.setattr(agreement, "level", level)
    of_layer = dc.ProcessGrid(comm, n=comm.size).world
    with agreement.as_in_later_steps():
        assert agreement.is_order_checked(of_layer) == (level == "all")
    assert agreement.is_order_checked(of_layer) == (level != "off")


@pytest.mark.ranks(2)
def test_after_an_error_in_a_measurement_operations_are_compared_again(comm) -> None:
    of_layer = dc.ProcessGrid(comm, n=comm.size).world
    with pytest.raises(KeyError), agreement.as_in_later_steps():
        raise KeyError
    assert agreement.is_order_checked(of_layer)

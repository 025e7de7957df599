"""Options of the commands that plan, and work on some ranks whose failure is raised on all ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from distconv.errors import DataError, DistconvError, PlanError
from distconv.jobs.planning.options import (
    RankOption,
    check_writable,
    choose_rank_count,
    run_on_first_ranks,
    run_on_rank_0,
    sample_shape,
)
from tests.distconv.layouts import raises_everywhere
from tests.jobs.command_lines import option_tests


def test_extents_are_read() -> None:
    assert sample_shape("3,224,160") == (3, 224, 160)


@pytest.mark.parametrize("text", ["", "3,", "3,-1", "3x4"])
def test_extents_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not the shape of a sample, channels first"):
        sample_shape(text)


@dataclass
class Timed:
    time: float
    estimated: bool


@pytest.mark.parametrize("at_most", [False, True])
def test_a_measured_time_is_not_compared_with_an_estimate_for_fewer_ranks(at_most: bool) -> None:
    times = {4: Timed(3.0, False), 2: Timed(2.0, False), 1: Timed(0.5, True)}
    count, best, remark = choose_rank_count(times.__getitem__, RankOption(4, at_most))
    assert (count, best) == ((2, times[2]) if at_most else (4, times[4]))
    assert "estimated by the roofline on 1" in remark and "0.5" not in remark


@pytest.mark.parametrize(
    ("estimated", "at_most", "count", "text"),
    [
        ({1: False, 2: False, 4: False}, False, 4, "fewer ranks are faster: 2000.000 ms on 2, 3000.000 ms on 4"),
        ({1: True, 2: True, 4: True}, True, 2, ""),
        ({1: True, 2: True, 4: False}, False, 4, "are measured on 4 and estimated by the roofline on 2"),
        ({1: False, 2: False, 4: True}, False, 4, "are estimated by the roofline on 4 and measured on 2"),
        ({1: False, 2: False, 4: True}, True, 4, "fewer ranks than 4 were not compared"),
    ],
)
def test_ranks_are_halved_as_long_as_that_is_faster_by_times_of_one_kind(
    estimated: dict[int, bool], at_most: bool, count: int, text: str
) -> None:
    seconds = {1: 2.5, 2: 2.0, 4: 3.0}
    found, best, remark = choose_rank_count(
        lambda ranks: Timed(seconds[ranks], estimated[ranks]), RankOption(4, at_most)
    )
    assert (found, best.time) == (count, seconds[count])
    assert text in remark and bool(text) == bool(remark)


def test_fewer_ranks_that_do_not_fit_or_take_as_long_are_not_taken() -> None:
    def plan(ranks: int) -> Timed:
        if ranks < 2:
            raise PlanError("does not fit")
        return Timed(2.0 if ranks > 2 else 1.0, False)

    assert choose_rank_count(plan, RankOption(4, at_most=True)) == (2, Timed(1.0, False), "")
    assert choose_rank_count(lambda ranks: Timed(1.0, False), RankOption(4, at_most=True)) == (4, Timed(1.0, False), "")


def test_what_the_first_rank_finds_all_ranks_get(comm) -> None:
    assert run_on_rank_0(comm, lambda: ("found", comm.rank)) == ("found", 0)


@pytest.mark.ranks(at_least=2)
def test_only_the_first_ranks_try(comm) -> None:
    tried: list[int] = []
    run_on_first_ranks(comm, 2, lambda: tried.append(comm.rank))
    assert comm.allgather(len(tried)) == [int(rank < 2) for rank in range(comm.size)]


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(
    ("error", "text"),
    [(PlanError("no plan fits"), "no plan fits"), (FileNotFoundError(2, "gone"), "gone"), (OSError(), "OSError")],
)
def test_a_failure_of_one_of_them_is_raised_on_all(comm, error: Exception, text: str) -> None:
    def attempt() -> None:
        if comm.rank == 1:
            raise error

    raises_everywhere(comm, DistconvError, text, lambda: run_on_first_ranks(comm, 2, attempt))


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_writable("--out", tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()
    with pytest.raises(DataError, match=r"is a folder\. Name a file"):
        check_writable("--out", tmp_path)
    with pytest.raises(DataError, match=r"no such folder .*gone\). Create it first"):
        check_writable("--out", tmp_path / "gone" / "x.json")


test_options_are_the_approved_ones, _ = option_tests("plan", "explore", "profile", "plan pointcloud")

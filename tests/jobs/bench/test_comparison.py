"""How benchmarks with predictions take times, and their tables."""

from __future__ import annotations

import time

import pytest
import torch

from distconv.distribution import Distribution
from distconv.jobs.bench.comparison import Comparison, deviation, random, row, table_head, timed
from tests.distconv.layouts import grid_over


def test_the_deviation_is_that_of_a_sample() -> None:
    assert deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    assert deviation([7.0]) == 0.0


def test_a_line_has_a_value_under_each_head() -> None:
    found = Comparison("FP", [0.001, 0.003], 0.004)
    assert row(found).split() == ["FP", "2.000", "1.414", "4.000", "2.000"]
    assert len(row(found)) == len(table_head("ms"))
    assert found.figures() == {"mean_s": 0.002, "deviation_s": pytest.approx(2e-6**0.5), "predicted_s": 0.004}


@pytest.mark.ranks(2, 3)
def test_a_time_is_that_of_the_slowest_rank_on_all_ranks(comm) -> None:
    found = timed(comm, torch.device("cpu"), lambda: time.sleep(0.05 if comm.rank == 1 else 0.0))
    assert found >= 0.05
    assert comm.allgather(found) == [found] * comm.size


def test_each_rank_draws_its_own_block(comm) -> None:
    found = random(Distribution(grid_over(comm, h=comm.size), (None, "h")), (2, 9), torch.device("cpu"))
    assert found.shape == (2, 9)
    assert sum(comm.allgather(found.local.shape[1])) == 9

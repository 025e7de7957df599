"""``distconv reproduce sparsepipe``: what its table of mixed GPUs says of every bandwidth."""

from __future__ import annotations

from itertools import product

import pytest

from distconv.jobs.papers.sparsepipe import setting as published
from distconv.jobs.papers.sparsepipe.command import mixed_table
from distconv.perfmodel.stages.partition import partition, stage_time

GIGABITS = (1, 2.5, 5, 10)


@pytest.mark.parametrize("sparse", [True, False])
def test_no_partition_beats_exact_and_all_figures_are_those_of_the_partitions(sparse, capsys):
    rows = mixed_table(sparse, GIGABITS)
    printed = capsys.readouterr().out
    profile = published.vgg16_bn("TitanXP", sparse)
    for row, (gpus, gigabit) in zip(rows, product(published.TABLE_III, GIGABITS), strict=True):
        devices, bandwidth = published.devices(gpus.counts, sparse), gigabit * 1e9 / 8
        for method, figures in row["stages"].items():
            found = partition(profile, devices, bandwidth, method)
            assert (figures["cuts"], figures["assignment"]) == (found.cuts, found.assignment)
            assert row["time_s"][method] == stage_time(profile, found, devices, bandwidth)
            assert f"{row['time_s'][method]:.5f}" in printed
        assert row["time_s"]["exact"] <= min(*row["time_s"].values(), row["published_s"])

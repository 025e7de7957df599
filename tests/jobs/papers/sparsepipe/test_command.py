"""``distconv reproduce sparsepipe``: its table of mixed GPUs against costs by hand and searches by brute force."""

from __future__ import annotations

import itertools

import pytest

from distconv.jobs.papers.sparsepipe import setting as published
from distconv.jobs.papers.sparsepipe.command import mixed_table
from tests.perfmodel.stages.partitions import by_hand, shares

LAYERS = 53
"""Of VGG16-BN, as the paper counts them."""

GIGABIT = 2.5


@pytest.fixture(scope="module", params=[True, False], ids=["sparse", "dense"])
def sparse(request):
    return request.param


@pytest.fixture(scope="module")
def rows(sparse):
    return mixed_table(sparse, [GIGABIT])


def by_eqs_4_and_5(sparse, counts, cuts, assignment):
    """Seconds per mini-batch, stage by stage and layer by layer."""
    profile, devices = published.vgg16_bn("TitanXP", sparse), published.devices(counts, sparse)
    return by_hand(profile, cuts, assignment, devices, GIGABIT * 1e9 / 8, "sparsepipe")


def test_a_row_is_for_the_gpus_of_the_paper_and_each_method_places_all_of_them(rows):
    assert [row["gigabit"] for row in rows] == [GIGABIT] * len(published.TABLE_III)
    for row, gpus in zip(rows, published.TABLE_III, strict=True):
        for figures in row["stages"].values():
            held = [sum(stage.get(name, 0) for stage in figures["assignment"]) for name in gpus.counts]
            assert held == list(gpus.counts.values())
            assert figures["replicas"] == tuple(sum(stage.values()) for stage in figures["assignment"])
            assert list(figures["cuts"]) == sorted(set(figures["cuts"])) and set(figures["cuts"]) < set(range(LAYERS))


def test_times_are_those_of_eqs_4_and_5_by_hand(rows, sparse):
    for row, gpus in zip(rows, published.TABLE_III, strict=True):
        for method, figures in row["stages"].items():
            expected = by_eqs_4_and_5(sparse, gpus.counts, figures["cuts"], figures["assignment"])
            assert row["time_s"][method] == pytest.approx(expected, rel=1e-12)


def test_no_two_stages_and_no_other_method_are_faster_than_exact(rows, sparse):
    for row, gpus in zip(rows, published.TABLE_III, strict=True):
        exact = row["time_s"]["exact"]
        assert exact <= min(*row["time_s"].values(), row["published_s"])
        for cut, held in itertools.product(range(4, LAYERS, 8), shares(list(gpus.counts.values()), 2)):
            if all(map(sum, held)):
                named = [{n: c for n, c in zip(gpus.counts, counts, strict=True) if c} for counts in held]
                assert exact <= by_eqs_4_and_5(sparse, gpus.counts, [cut], named) * (1 + 1e-12)


def test_the_papers_groups_have_the_best_cuts_of_all(rows, sparse):
    for row, gpus in zip(rows, published.TABLE_III, strict=True):
        if len(gpus.assignment) == 2:
            times = [by_eqs_4_and_5(sparse, gpus.counts, [cut], gpus.assignment) for cut in range(1, LAYERS)]
            assert row["published_s"] == pytest.approx(min(times), rel=1e-12)


def test_every_time_is_printed_beside_the_partition_of_the_paper(capsys):
    found = mixed_table(True, [1, 10])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    assert len(found) == len(printed) == 2 * len(published.TABLE_III)
    for row, line in zip(found, printed, strict=True):
        assert all(f"{time:.5f}" in line for time in (*row["time_s"].values(), row["published_s"]))
    for gpus, line in zip(published.TABLE_III, printed[::2], strict=True):
        assert gpus.homogeneous in line and gpus.heterogeneous in line

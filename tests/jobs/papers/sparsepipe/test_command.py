"""``distconv reproduce sparsepipe``: its table of mixed GPUs against costs by hand and searches by brute force."""

from __future__ import annotations

import itertools

import pytest

from distconv import cli
from distconv.jobs.papers.sparsepipe import setting as published
from distconv.jobs.papers.sparsepipe.command import mixed_table
from tests.perfmodel.stages.partitions import by_hand, random_profile, shares

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


def test_the_tables_are_printed_and_bad_input_ends_with_one_line(tmp_path, capsys):
    random_profile(1).save(tmp_path / "net.json")
    out = tmp_path / "out.json"
    arguments = [str(tmp_path / "net.json"), "--devices", "2", "--gigabits", "1", "--json", str(out)]
    assert reproduced(*arguments) == 0
    printed = capsys.readouterr().out
    assert "net" in printed and printed.count("SparsePipe, Table III") == 2
    assert out.stat().st_size > 0
    assert reproduced(str(tmp_path / "none.json")) == 2
    error = capsys.readouterr().err
    assert error.startswith("distconv reproduce sparsepipe: profile ") and error.count("\n") == 1
    with pytest.raises(SystemExit) as stopped:
        reproduced("--devices", "0")
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def reproduced(*arguments):
    return cli.main(["reproduce", "sparsepipe", *arguments])

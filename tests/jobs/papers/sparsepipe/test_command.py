"""``distconv reproduce sparsepipe``: its table of mixed GPUs against costs by hand, options, and the printed text."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.papers.sparsepipe import command
from distconv.jobs.papers.sparsepipe import setting as published
from distconv.jobs.papers.sparsepipe.command import mixed_table
from distconv.perfmodel.profiles.layer_profile import ProfileError
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, commands_in, noting, on_any_machine, option_tests, parsed
from tests.perfmodel.stages.partitions import random_profile, reference_time

LAYERS = 52
"""Layers of VGG16-BN. The paper and the roofline count one more, which flattens."""

GIGABIT = 2.5


SOURCES = [published.by_roofline(True), published.by_roofline(False), *published.as_measured()]


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: source.name)
def source(request):
    return request.param


@pytest.fixture(scope="module")
def rows(source):
    return mixed_table(source, [GIGABIT])


def by_eqs_4_and_5(source, counts, cuts, assignment):
    """Seconds per mini-batch, stage by stage and layer by layer."""
    profile, devices = source.on("TitanXP"), source.devices(counts)
    return reference_time(profile, cuts, assignment, devices, GIGABIT * 1e9 / 8, "sparsepipe")


def test_a_row_is_for_the_gpus_of_the_paper_and_each_method_places_all_of_them(rows):
    assert [row["gigabit"] for row in rows] == [GIGABIT] * len(published.TABLE_III)
    for row, gpus in zip(rows, published.TABLE_III, strict=True):
        for figures in row["stages"].values():
            held = [sum(stage.get(name, 0) for stage in figures["assignment"]) for name in gpus.counts]
            assert held == list(gpus.counts.values())
            assert figures["replicas"] == tuple(sum(stage.values()) for stage in figures["assignment"])
            assert list(figures["cuts"]) == sorted(set(figures["cuts"])) and set(figures["cuts"]) < set(range(LAYERS))


def test_times_are_those_of_eqs_4_and_5_by_hand(rows, source):
    for row, gpus in zip(rows, published.TABLE_III, strict=True):
        for method, figures in row["stages"].items():
            expected = by_eqs_4_and_5(source, gpus.counts, figures["cuts"], figures["assignment"])
            assert row["time_s"][method] == pytest.approx(expected, rel=1e-12)
        assert row["data_parallel_s"] == pytest.approx(
            by_eqs_4_and_5(source, gpus.counts, [], [gpus.counts]), rel=1e-12
        )


def test_the_papers_groups_have_the_best_cuts_of_all(rows, source):
    for row, gpus in zip(rows, published.TABLE_III, strict=True):
        if len(gpus.assignment) == 2:
            layers = len(source.on("TitanXP").layers)
            times = [by_eqs_4_and_5(source, gpus.counts, [cut], gpus.assignment) for cut in range(1, layers)]
            assert row["published_s"] == pytest.approx(min(times), rel=1e-12)


def test_it_says_how_many_splits_come_out_and_how_late_the_time_is_spent(capsys):
    """Dense, with messages four times as large, more do: by hand 11 % of the roofline's time is behind layer 23."""
    dense = published.by_roofline(False)
    times = [layer.time_s for layer in dense.on("TitanXP").layers]
    share = 100 * sum(times[24:]) / sum(times)
    for factor in (1.0, 4.0):
        rows = mixed_table(dense.with_larger_messages(factor), [1.0, 10.0])
        came_out = sum(row["as_published"]["sparsepipe"] for row in rows)
        said = capsys.readouterr().out
        assert f"\nHETE-MP's splits: {came_out} of 8." in said and f"here they take {share:.1f}%" in said
        assert ("messages 4 times as large" in said) == (factor == 4.0)
    assert came_out == 4 and dense.with_larger_messages(1.0) is dense


def test_the_tables_are_written_and_bad_input_ends_with_one_line(tmp_path, capsys):
    words, out = ["reproduce", "sparsepipe"], tmp_path / "out.json"
    random_profile(1).save(tmp_path / "net.json")
    arguments = [str(tmp_path / "net.json"), "--devices", "2", "--gigabits", "1", "--json", str(out)]
    assert cli.main([*words, *arguments]) == 0
    assert out.stat().st_size > 0
    capsys.readouterr()
    assert_refused(capsys, [*words, str(tmp_path / "none.json")], "distconv reproduce sparsepipe: profile ")
    assert_refused(capsys, [*words, "--devices", "0"], "argument --devices: ")


def test_measured_layers_take_together_what_the_paper_measured_on_one_gpu():
    by_operations, by_bandwidth = published.as_measured()
    for source in (by_operations, by_bandwidth):
        seconds = [sum(layer.time_s for layer in source.on(gpu).layers) for gpu in ("TitanXP", "TitanV", "RTX")]
        assert seconds[0] == pytest.approx(129.63 * 64 / 9843)
        assert [layer.name for layer in source.on("RTX").layers] == [layer.name for layer in source.on("TitanV").layers]
        ratios = (12.1 / 13.8, 12.1 / 13.4) if source is by_operations else (547 / 653, 547 / 352)
        assert [each / seconds[0] for each in seconds[1:]] == pytest.approx(ratios)
    with pytest.raises(ProfileError):
        published.as_measured(published.MEASURED.with_name("nothing.json"))


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))


def test_tables_are_printed_as_approved(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in ((1, "one"), (2, "two")):
        random_profile(seed).save(tmp_path / f"{name}.json")
    words = "one.json two.json --devices 2 3 --bandwidth 2e9 --gigabits 2.5 10 --messages 4"
    assert cli.main(["reproduce", "sparsepipe", *words.split()]) == 0
    assert_approved("sparsepipe", re.sub(r"[\d.]+ ms \(", "T ms (", capsys.readouterr().out))


def test_tables_are_of_what_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    source = SimpleNamespace(name="source")
    source.with_larger_messages = noting(lines, "larger messages", source)
    monkeypatch.setattr(command, "mixed_table", noting(lines, "mixed", []))
    monkeypatch.setattr(command, "profile_table", noting(lines, "profiles", []))
    monkeypatch.setattr(command.published, "by_roofline", noting(lines, "roofline", source))
    monkeypatch.setattr(command.published, "as_measured", noting(lines, "measured", [source]))
    settings = "--devices 3 5 --bandwidth 5e8 --gigabits 1 40 --messages 3 --measured other.json --measured-batch 8"
    for words in ("net.json", f"net.json {settings}"):
        lines.append(f"reproduce sparsepipe {words}")
        command._tables(parsed("reproduce sparsepipe", *words.split()))
    assert_approved("sparsepipe-options", on_any_machine("\n".join(lines)))

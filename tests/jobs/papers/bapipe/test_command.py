"""BaPipe's tables: the networks, fitted links, directions of speedups, and the printed text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from distconv.jobs.papers.bapipe import command, cuts, fpga, largest_model
from distconv.jobs.papers.bapipe.networks import gnmt, networks
from distconv.perfmodel.exploration.candidate_stages import ExplorationContext
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.devices import Device
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, commands_in, noting, option_tests, parsed

V100 = Machine.load("v100-pcie")


def millions(profile):
    return sum(layer.parameter_bytes for layer in profile.layers) / 4e6


@pytest.mark.parametrize(("layers", "published"), [(32, 445.6), (42, 550.6), (60, 739.5), (74, 886.4), (118, 1350)])
def test_gnmt_has_the_parameters_of_table_iv(layers, published):
    assert millions(gnmt(layers, 1, V100)) == pytest.approx(published, rel=2e-3)


@pytest.mark.long
def test_the_networks_of_table_iii_have_their_parameters():
    found = {name: millions(profile(1)) for name, profile in networks(V100).items()}
    assert found["VGG-16"] == pytest.approx(138.36, rel=1e-3)
    assert found["ResNet-50"] == pytest.approx(25.56, rel=1e-3)


FITTED = command.fitted_machine(V100)
FASTER = replace(FITTED, node=replace(FITTED.node, bandwidth_bytes_per_s=2e9))


PROFILES = cache(lambda: networks(FITTED))


@cache
def data_parallel(model, gpus):
    return command.throughput(PROFILES()[model], FITTED, gpus, schedule="dp", microbatches=gpus, size=64)


def speedup(model, gpus, schedule, microbatches, size, neighbours=FITTED):
    pipelined = command.throughput(
        PROFILES()[model], neighbours, gpus, schedule=schedule, microbatches=microbatches, size=size
    )
    return pipelined / data_parallel(model, gpus)


def test_the_fitted_link_gives_the_figures_it_was_fitted_to():
    # The fit leaves out latencies and the additions of an allreduce.
    assert speedup("VGG-16", 4, "dp", 4, 32) == pytest.approx(0.62, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "gpus", "microbatches", "size", "neighbours", "low", "high"),
    [  # the harder neighbours of each inequality
        ("ResNet-50", 4, 32, 32, FASTER, 0, 1),
        ("GNMT-8", 4, 32, 64, FITTED, 3, 99),
        ("VGG-16", 4, 128, 8, FITTED, 1.5, 99),
        ("VGG-16", 8, 512, 8, FITTED, 0, 1),
        ("VGG-16", 8, 512, 8, FASTER, 1, 99),
    ],
)
def test_a_pipeline_beats_data_parallelism_where_the_paper_says(model, gpus, microbatches, size, neighbours, low, high):
    assert low < speedup(model, gpus, "1f1b-so", microbatches, size, neighbours) < high


@pytest.mark.parametrize("name", ["1f1b-sno", "1f1b-so"])
def test_searched_cuts_are_no_slower_and_the_closed_form_is_near_the_simulation(name):
    setting = ExplorationContext(gnmt(8, 32, FITTED), FITTED, [Device("GPU", 4, memory=1e18)], 1)
    row = cuts.compare_cuts("GNMT-8", setting, name)
    assert row["searched_s"] <= row["bapipe_s"]
    assert 1 - 1e-9 <= row["bapipe_over"] < 1.05 and 1 - 1e-9 <= row["searched_over"] < 1.05


def test_the_largest_network_grows_with_the_devices_of_a_pipeline_and_not_with_those_of_data_parallelism(capsys):
    rows = largest_model.rows_of(V100, 8e9, "", (1, 2, 4))
    found = {(row["system"], row["gpus"]): row["layers"] for row in rows}
    assert found["DP", 1] == found["DP", 2] == found["DP", 4]
    for system in ("GPipe", "BaPipe"):
        assert found[system, 1] == found["DP", 1] < found[system, 2] < found[system, 4]
    assert found["BaPipe", 4] > found["GPipe", 4]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    assert [words[0] for words in lines if words and words[0] in systems] == systems
    assert all(len(words) == 1 + 3 * 5 for words in lines if words and words[0] in systems)  # "9 (1M) | 8 (1M)" each


def test_the_largest_network_fits_and_the_next_one_does_not():
    assert largest_model.largest(lambda layers: layers <= 37) == 36
    assert largest_model.largest(lambda layers: layers <= 38) == 38


@pytest.mark.long
def test_the_fpgas_speedups_are_on_both_sides_of_the_papers_and_grow_with_their_arithmetic(capsys):
    rows = fpga.table_vi()
    for row in rows:
        assert row["speedup"]["by layer"] < row["paper"] < row["speedup"]["streamed"]
        assert row["pipeline_s"]["fbp-as"] <= row["pipeline_s"]["1f1b-as"]
        assert row["closed_s"] == pytest.approx(row["pipeline_s"]["1f1b-as"], rel=0.01)
    streamed = [row["speedup"]["streamed"] for row in rows]
    assert streamed == sorted(streamed)
    assert capsys.readouterr().out.count("vcu129") == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--machine", "none"], "no built-in machine has this name"),
        (["--link", "fast"], "is not a bandwidth"),
        (["--json", "/nowhere/table.json"], "--json /nowhere/table.json: no such folder (/nowhere)"),
    ],
)
def test_bad_input_ends_with_one_line(arguments, text, capsys):
    assert_refused(capsys, ["reproduce", "bapipe", "--tables", "IV", *arguments], text)


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))


def by_hand(parameter_bytes: float) -> Callable[[int], Profile]:
    """A network of eight layers whose times and outputs grow with the samples."""

    def layer(index: int, size: int) -> Layer:
        times = size * 1e-5 * (1 + index % 3), size * 2.1e-5 * (1 + index % 3)
        return Layer(f"l{index}", *times, size * 1e4, parameter_bytes)

    return lambda size: Profile([layer(index, size) for index in range(8)])


def test_rows_of_table_iii_are_printed_as_approved(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks with many and with few parameters."""
    profiles = {"VGG-16": by_hand(4e7), "ResNet-50": by_hand(4e4)}
    monkeypatch.setattr(command, "networks", lambda machine: profiles)
    rows = tuple(row for row in command.TABLE_III if row.model in profiles and row.gpus < 8)
    monkeypatch.setattr(command, "TABLE_III", rows)
    machine = Machine.load("v100-pcie")
    given = command.table_iii(machine, 16e9, 2e9)
    command.table_iii(machine, 16e9, None)
    command.table_iii(machine, None, None)
    assert_approved("bapipe-table-iii", capsys.readouterr().out)
    assert [(row["model"], row["gpus"]) for row in given] == [(row.model, row.gpus) for row in rows]


def test_the_table_of_cuts_is_printed_as_approved(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The returned numbers are those in the table. The network is small."""
    monkeypatch.setattr(cuts, "networks", lambda machine: {"small": by_hand(4e6)})
    rows = cuts.cuts_table(Machine.load("v100-pcie"))
    printed = capsys.readouterr().out
    assert_approved("bapipe-cuts", printed)
    for row in rows:
        assert f"{row['bapipe_s']:.3f} ({row['bapipe_over']:.3f})" in printed
        assert f"{row['searched_s']:.3f} ({row['searched_over']:.3f})" in printed


def test_tables_are_for_the_machine_and_links_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    monkeypatch.setattr(command, "fitted_machine", lambda machine: f"fitted {machine.name}")
    for name in ("schedules_table", "table_iii", "table_iv", "table_vi", "cuts_table"):
        monkeypatch.setattr(command, name, noting(lines, name))
    links = "--machine localhost --link 16GB/s --neighbours 2GB/s"
    for words in ("", "--tables III", "--tables cuts I-II", links):
        lines.append(f"reproduce bapipe {words}")
        command._tables(parsed("reproduce bapipe", *words.split()))
    assert_approved("bapipe-tables", "\n".join(lines))

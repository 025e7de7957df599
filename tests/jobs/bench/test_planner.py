"""``distconv bench planner``: each search begins with empty caches; the printed text, and what it refuses."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.bench import planner
from distconv.perfmodel.cost import block_geometry
from distconv.perfmodel.strategy import selection
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused
from tests.jobs.planning import planned_files

printing = command.printing

folder = planned_files.folder

NETWORK = ["--model", "planned_nets:build", "--input", "3,16,16", "--batch", "4", "--machine", "./tiny.yaml"]


@pytest.mark.ranks(1)
def test_each_search_has_its_method_and_limit_and_begins_with_empty_caches(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = []

    def select(*arguments: Any, **named: Any) -> Any:
        known.append((block_geometry.redistribution.cache_info().currsize, *named.values()))
        found = selection.select(*arguments, **named)
        assert block_geometry.redistribution.cache_info().currsize > 0
        return found

    monkeypatch.setattr(planner, "select", select)
    assert cli.main(["bench", "planner", *NETWORK, "--from", "4", "--to", "4", "--memory", "1GB"]) == 0
    assert known == [(0, 10**9, "exact"), (0, 10**9, "longest-path")]


@pytest.mark.ranks(2)
def test_no_number_of_ranks_is_refused_before_planning(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "planner", *NETWORK, "--from", "8", "--to", "4"]
    assert_refused(capsys, words, "distconv bench planner: --from 8: larger than --to 4. Swap the values.")


@pytest.mark.ranks(1)
def test_the_printed_text_is_as_approved(printing: command.Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = (number * number / 8 for number in count())
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    network = ["--model", "unet", "--width", "4", "--input", "18,32,32", "--batch", "6", "--machine", "lassen"]
    printing.approve("planner", None, "planner", *network, "--from", "2", "--to", "6")
    slower = {"exact": 0.002, "longest-path": 0.001}

    def select(graph: Any, machine: Any, ranks: int, *, memory: Any, method: str) -> Any:
        return SimpleNamespace(time=slower[method] if ranks < 3 else 0.0015 + 0.001 * (method != "exact"), gap=0.25)

    monkeypatch.setattr(planner, "select", select)
    printing.approve("planner-slower", None, "planner", *network, "--from", "2", "--to", "5")

"""What ``distconv plan`` prints: the figures of the strategy, added up."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from distconv.jobs.planning import report
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import select
from tests.perfmodel.networks import machine

MODEL = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
GRAPH = trace(MODEL, (4, 3, 16, 16))
STRATEGY = select(GRAPH, machine(), 4)


def numbers(line: str, count: int) -> list[float]:
    return [float(word) for word in line.split()[-count:]]


def test_totals_are_sums_over_the_lines_of_the_layers() -> None:
    figures = len(report.FIGURES)
    head, *lines = report.layers(STRATEGY.prediction)
    assert head.split()[-figures:] == list(report.FIGURES)
    assert [line.split()[0] for line in lines] == ["0", "2"]
    sums = [sum(column) for column in zip(*(numbers(line, figures) for line in lines), strict=True)]
    *found, hidden, step, memory = numbers(list(report.totals(STRATEGY))[1], figures + 3)
    assert found == pytest.approx(sums, abs=2e-3)
    assert step == pytest.approx(1e3 * STRATEGY.time, abs=1e-3)
    assert sum(found) - hidden == pytest.approx(step, abs=1e-2)
    assert memory == pytest.approx(STRATEGY.memory / 1e9, rel=1e-3)


def test_pure_parallelism_has_a_line_each_and_the_bound_the_last() -> None:
    lines = list(report.totals(STRATEGY))
    assert sum(line.startswith("  pure ") for line in lines) == len(STRATEGY.uniform)
    assert lines[-1].endswith("gap 0.00%, the best")


def test_the_heading_says_what_is_planned_for_what() -> None:
    options = argparse.Namespace(model="mine", batch=4, input=(3, 16, 16), ranks=4, out=Path("p.json"))
    text = report.heading(options, GRAPH, machine(), 2e9)
    assert text == (
        "mine: 4 samples of 3 x 16 x 16, float32, 2 convolution and linear layers, on 4 ranks of small (2 per node) "
        "with at most 2 GB each"
    )

"""Printed report of ``distconv plan``: the sums of the strategy's times."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distconv.jobs.planning import report
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import select
from tests.jobs.approved import assert_approved
from tests.perfmodel.networks import machine

MODEL = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
GRAPH = trace(MODEL, (4, 3, 16, 16))
STRATEGY = select(GRAPH, machine(), 4)


def numbers(line: str, count: int) -> list[float]:
    return [float(word) for word in line.split()[-count:]]


def test_totals_are_sums_over_the_lines_of_the_layers() -> None:
    figures = len(report.FIGURES)
    head, *lines = report.layer_table(STRATEGY.prediction)
    assert head.split()[-figures:] == list(report.FIGURES)
    assert [line.split()[0] for line in lines] == ["0", "2"]
    sums = [sum(column) for column in zip(*(numbers(line, figures) for line in lines), strict=True)]
    *found, hidden, step, memory = numbers(list(report.totals_table(STRATEGY))[1], figures + 3)
    assert found == pytest.approx(sums, abs=2e-3)
    assert step == pytest.approx(1e3 * STRATEGY.time, abs=1e-3)
    assert sum(found) - hidden == pytest.approx(step, abs=1e-2)
    assert memory == pytest.approx(STRATEGY.memory / 1e9, rel=1e-3)


def test_tables_are_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a method that is not possible, and a bound that proves nothing."""
    monkeypatch.setattr(report, "packages_bytes", {"mine": 300_000_000}.__getitem__)
    options = argparse.Namespace(model="mine", ranks=4)
    unproven = replace(
        STRATEGY, bound=0.0, optimal=False, uniform={**STRATEGY.uniform, "spatial": None}, impossible={"spatial": "why"}
    )
    lines = [*report.totals_table(STRATEGY), *report.totals_table(unproven), *report.layer_table(STRATEGY.prediction)]
    lines += [report.process_memory_line(options, GRAPH, STRATEGY, machine(), limit) for limit in (9e8, 3e8)]
    assert_approved("plan-tables", "\n".join(lines))


def test_the_heading_says_what_is_planned_for_what() -> None:
    options = argparse.Namespace(model="mine", batch=4, input=(3, 16, 16), ranks=4, memory_format="contiguous")
    expected = (
        "mine: 4 samples of 3 x 16 x 16, float32, 2 convolution and linear layers, on 4 ranks of small (2 per node) "
        "with at most 2 GB each"
    )
    for captured, more in ((False, ""), (True, "; steps are contiguous, captured")):
        options.captured = captured
        assert report.heading(options, GRAPH, machine(), 2e9) == expected + more


TRAIN = "mpiexec -n 4 distconv train"


@pytest.mark.parametrize(
    ("model", "channels", "changes", "expected"),
    [
        ("lenet5", 3, {}, f"{TRAIN} classify --data PATH --model lenet5 --batch 4 --plan p.json"),
        (
            "lenet5",
            3,
            {"width": 8, "shard_optimizer": True},
            f"{TRAIN} classify --data PATH --model lenet5 --width 8 --batch 4 --plan p.json --shard-optimizer",
        ),
        ("unet", 18, {}, f"{TRAIN} mesh --data PATH --model unet --batch 4 --plan p.json"),
        ("unet", 3, {}, f"{TRAIN} segmentation --data PATH --model unet --batch 4 --plan p.json"),
        (
            "unet",
            18,
            {"classes": 5},
            f"{TRAIN} segmentation --data PATH --model unet --classes 5 --batch 4 --plan p.json",
        ),
        ("unet", 3, {"shard_optimizer": True}, "dc.parallelize(model, dc.Plan.load('p.json')) on 4 ranks"),
    ],
)
def test_what_trains_with_a_plan_is_a_line_to_be_copied(
    model: str, channels: int, changes: dict[str, object], expected: str
) -> None:
    given = {"model": model, "batch": 4, "input": (channels, 16, 16), "ranks": 4, "out": Path("p.json")}
    options = argparse.Namespace(**given | {"width": None, "classes": None, "shard_optimizer": False} | changes)
    layers = [torch.nn.Conv2d(channels, 4, 3)]
    layers += [] if model == "unet" else [torch.nn.Flatten(), torch.nn.Linear(4 * 14 * 14, 5)]
    graph = trace(torch.nn.Sequential(*layers), (4, channels, 16, 16))
    assert report.training_command(options, graph) == expected

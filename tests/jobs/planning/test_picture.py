"""Pictures of plans and of measured step times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from torch import nn

from distconv.errors import DataError
from distconv.jobs.planning import picture
from distconv.jobs.planning.halo_picture import Halo, HaloSide
from distconv.jobs.planning.strong_scaling import Scaling, ScalingPoint
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import select
from tests.jobs.approved.figures import approve_figures
from tests.perfmodel.networks import machine


def test_a_picture_of_a_format_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    picture.check_format(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x\.doc: unknown file format. Use a name that ends in one of .*png"):
        picture.check_format(tmp_path / "x.doc")


@pytest.mark.parametrize(("profiled", "edges"), [(None, []), (2, [8**0.5]), (4, [])])
def test_where_measured_layers_end_is_marked_between_two_numbers_of_ranks(
    profiled: int | None, edges: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.axvspan", lambda self, start, end, **_: drawn.append(start))
    curves = {"planned": {ranks: ScalingPoint(4.0 / ranks, 1.0) for ranks in (1, 2, 4)}}
    picture.draw_scaling(Figure().add_subplot(), Scaling(curves, profiled), memory=2.0)
    assert drawn == pytest.approx(edges)


def test_figures_of_a_plan_and_of_measured_steps_are_as_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is small. Its layers have different distributions, with and without a halo."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 40))
    graph = trace(network, (2, 3, 8, 8))
    strategy = select(graph, machine(), 4)
    plan = {"0": {"n": 2, "h": 2}, "1": {"n": 2, "w": 2}, "3": {"c": 4}}
    strategy = replace(strategy, prediction=evaluate(graph, plan, machine(), 4))
    approve_figures(monkeypatch, picture, "plan")
    curves = {
        name: {ranks: ScalingPoint(4.0 / ranks + index, ranks * 4e4) for ranks in (2, 4, 8)[: 3 - index]}
        for index, name in enumerate(("planned", "pure sample", "pure spatial"))
    }
    halo = Halo("conv", (HaloSide("h", 8, 2, 0, 0, 1), HaloSide("w", 9, 3, 1, 1, 1)), 9)
    for each in (None, halo):
        scaling = Scaling(curves, 4 if each else None)
        picture.draw(Path("x.png"), strategy, scaling, halo=each, memory=1e5, title="of lenet5")
    monkeypatch.setattr(picture, "MOST_NAMES", 2)
    picture.draw(Path("many.png"), strategy, Scaling(curves), halo=None, memory=1e6, title="of many layers")
    measured = {"pure sample": {2: [1.0, 3.0], 4: [1.0]}, "planned": {2: [4.0, 5.0, 9.0]}}
    picture.draw_measured(Path("y.png"), Scaling(curves), measured, "a title")


@pytest.mark.parametrize(("factor", "is_drawn"), [(3.9, True), (4.1, False)])
def test_the_limit_of_memory_is_a_line_where_bars_can_still_be_told_apart(factor: float, is_drawn: bool) -> None:
    strategy = select(trace(nn.Sequential(nn.Conv2d(3, 8, 3)), (4, 3, 64, 64)), machine(), 2)
    alone = [strategy.prediction, *(each for each in strategy.uniform.values() if each)]
    memory = factor * max(each.memory for each in alone)
    axis = Figure().add_subplot()
    picture.draw_memory(axis, strategy, memory=memory)
    heights = [line.get_ydata()[0] for line in axis.lines]
    assert heights == ([pytest.approx(memory / 1e9)] if is_drawn else [])
    assert [text.get_text() for text in axis.texts] == [f"{each.memory / 1e9:.3g}" for each in alone]
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert set(legend) == {"weights, optimizer's state", "of a step", *(["limit"] if heights else [])}
    assert (axis.get_ylabel(), axis.get_title()) == ("GB", "tensors on the rank with the peak memory")

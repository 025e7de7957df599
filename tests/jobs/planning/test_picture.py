"""Pictures of plans and of measured step times."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from distconv.errors import DataError
from distconv.jobs.planning import picture
from distconv.jobs.planning.strong_scaling import Point, Scaling
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import select
from tests.perfmodel.networks import machine


def test_bars_are_the_deviations_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda self, x, y, yerr, **_: drawn.append((x, y, yerr)))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *_, **__: None)
    curves = {"planned": {1: Point(2.0, 1.0), 2: Point(1.0, 1.0)}}
    picture.draw_measured(tmp_path / "x.png", Scaling(curves), {"planned": {1: [1.0, 3.0], 2: [1.0]}}, "title")
    assert drawn == [([1, 2], [2000.0, 1000.0], [pytest.approx(1000 * 2**0.5), 0.0])]


def test_a_picture_of_a_format_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    picture.check_format(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x\.doc: not a picture that can be drawn; its name ends in one of .*png"):
        picture.check_format(tmp_path / "x.doc")


@pytest.mark.parametrize(("profiled", "edges"), [(None, []), (2, [8**0.5]), (4, [])])
def test_where_measured_layers_end_is_marked_between_two_numbers_of_ranks(
    profiled: int | None, edges: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.axvspan", lambda self, start, end, **_: drawn.append(start))
    curves = {"planned": {ranks: Point(4.0 / ranks, 1.0) for ranks in (1, 2, 4)}}
    picture.draw_scaling(Figure().add_subplot(), Scaling(curves, profiled), memory=2.0)
    assert drawn == pytest.approx(edges)


def test_bars_of_memory_are_what_lasts_and_what_a_step_adds() -> None:
    from matplotlib.figure import Figure

    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
    strategy = select(trace(network, (4, 3, 16, 16)), machine(), 2)
    axis = Figure().add_subplot()
    picture.draw_memory(axis, strategy, memory=1e9)
    shown = [label.get_text() for label in axis.get_xticklabels()]
    assert shown == ["planned", "pure sample", "pure spatial"]
    weights = 4 * sum(parameter.numel() for parameter in network.parameters())
    lasting, others = axis.patches[:3], axis.patches[3:]
    assert lasting[1].get_height() == pytest.approx(2 * weights / 1e9)  # with momentum, on each rank
    tops = [bar.get_y() + bar.get_height() for bar in others]
    found = [strategy.prediction, strategy.uniform["sample"], strategy.uniform["spatial"]]
    assert tops == pytest.approx([each.memory / 1e9 for each in found])
    assert not axis.lines  # the limit is far


def test_times_are_in_milliseconds_beside_ideal_ones_and_hollow_where_they_do_not_fit() -> None:
    from matplotlib.figure import Figure

    axis = Figure().add_subplot()
    curves = {"planned": {1: Point(4.0, 3.0), 2: Point(2.5, 2.0), 4: Point(2.0, 1.0)}}
    picture.draw_scaling(axis, Scaling(curves), memory=2.0)
    drawn = [(line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
    assert drawn[0][1:] == ([1, 2, 4], [4000, 2500, 2000])
    assert [values for style, _, values in drawn if style == "--"] == [[4000, 2000, 1000]]
    points = {line.get_xdata()[0]: line.get_fillstyle() for line in axis.lines if len(line.get_xdata()) == 1}
    assert points == {1: "none", 2: "full", 4: "full"}

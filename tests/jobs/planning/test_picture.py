"""Pictures of plans and of measured step times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from torch import nn

from distconv.errors import DataError
from distconv.jobs.planning import picture
from distconv.jobs.planning.halo_picture import Halo, HaloSide
from distconv.jobs.planning.strong_scaling import Scaling, ScalingPoint
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import Strategy, select
from tests.perfmodel.networks import machine


def test_bars_are_the_deviations_of_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda self, x, y, yerr, **_: drawn.append((x, y, yerr)))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *_, **__: None)
    curves = {"planned": {1: ScalingPoint(2.0, 1.0), 2: ScalingPoint(1.0, 1.0)}}
    picture.draw_measured(tmp_path / "x.png", Scaling(curves), {"planned": {1: [1.0, 3.0], 2: [1.0]}}, "title")
    assert drawn == [([1, 2], [2000.0, 1000.0], [pytest.approx(1000 * 2**0.5), 0.0])]


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


def test_bars_of_memory_are_what_lasts_and_what_a_step_adds() -> None:
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
    axis = Figure().add_subplot()
    curves = {"planned": {1: ScalingPoint(4.0, 3.0), 2: ScalingPoint(2.5, 2.0), 4: ScalingPoint(2.0, 1.0)}}
    picture.draw_scaling(axis, Scaling(curves), memory=2.0)
    drawn = [(line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines]
    assert drawn[0][1:] == ([1, 2, 4], [4000, 2500, 2000])
    assert [values for style, _, values in drawn if style == "--"] == [[4000, 2000, 1000]]
    points = {line.get_xdata()[0]: line.get_fillstyle() for line in axis.lines if len(line.get_xdata()) == 1}
    assert points == {1: "none", 2: "full", 4: "full"}


def drawn_plan(monkeypatch: pytest.MonkeyPatch, halo: Halo | None) -> tuple[Any, Strategy]:
    """The figure of a small plan whose layers have different distributions."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 40))
    graph = trace(network, (2, 3, 8, 8))
    strategy = select(graph, machine(), 4)
    plan = {"0": {"n": 2, "h": 2}, "1": {"n": 2, "w": 2}, "3": {"c": 4}}
    strategy = replace(strategy, prediction=evaluate(graph, plan, machine(), 4))
    figures: list[Any] = []
    monkeypatch.setattr(picture, "write_picture", lambda path, figure, dpi: figures.append(figure))
    curves = {"planned": {ranks: ScalingPoint(4.0 / ranks, 1.0) for ranks in (1, 2, 4)}}
    picture.draw(Path("x.png"), strategy, Scaling(curves), halo=halo, memory=1e6, title="of lenet5")
    return figures[0], strategy


def test_the_picture_of_a_plan_shows_its_parts_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    figure, strategy = drawn_plan(monkeypatch, None)
    splits, times, *_ = figure.axes
    layers = list(strategy.prediction.layers.values())
    assert figure.get_suptitle() == "of lenet5"
    # Rows n, c, h, w: 2 2 1, 1 1 4, 2 1 1, 1 2 1, as powers of two.
    (image,) = splits.images
    shown = dict(zip([label.get_text() for label in splits.get_yticklabels()], image.get_array().tolist(), strict=True))
    assert shown == {"n": [1, 1, 0], "c": [0, 0, 2], "h": [1, 0, 0], "w": [0, 1, 0]}
    assert image.get_clim() == (0, pytest.approx(2.8))
    rows = list(shown)
    numbers = {(rows[y], x): each.get_text() for each in splits.texts for x, y in [each.get_position()]}
    assert numbers == {("n", 0): "2", ("n", 1): "2", ("c", 2): "4", ("h", 0): "2", ("w", 1): "2"}
    figures = ("fp", "bpx", "bpw", "bpa", "halo", "sync", "shuffle", "update")
    heads = ["FP", "BPx", "BPw", "BPa", "halo", "sync", "shuffle", "update"]
    assert [text.get_text() for text in times.get_legend().get_texts()] == heads
    for index, layer in enumerate(layers):
        bars, below = times.patches[index :: len(layers)], 0.0
        for bar, name in zip(bars, figures, strict=True):
            assert bar.get_x() + bar.get_width() / 2 == pytest.approx(index)
            assert (bar.get_y(), bar.get_height()) == pytest.approx((below, 1e3 * getattr(layer, name)))
            below += 1e3 * getattr(layer, name)
    assert [label.get_text() for label in times.get_xticklabels()] == ["0", "1", "3"]
    assert times.get_ylabel() == "ms, without overlap"


def test_a_halo_is_drawn_beside_the_scaling_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    without, _ = drawn_plan(monkeypatch, None)
    with_halo, _ = drawn_plan(
        monkeypatch, Halo("conv", (HaloSide("h", 8, 2, 0, 0, 1), HaloSide("w", 8, 2, 0, 0, 1)), 9)
    )
    titles = [axis.get_title() for axis in with_halo.axes]
    assert len(without.axes) == 4 and len(with_halo.axes) == 5 and titles[3].startswith("largest halo: conv")


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


def test_curves_of_measured_and_predicted_steps_have_names_and_axes(tmp_path: Path, monkeypatch: Any) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(picture, "write_picture", lambda path, figure, dpi: figures.append(figure))
    curves = {
        name: {1: ScalingPoint(2.0, 1.0), 2: ScalingPoint(1.0, 1.0)}
        for name in ("planned", "pure sample", "pure spatial")
    }
    picture.draw_measured(tmp_path / "x.png", Scaling(curves), {"pure sample": {1: [1.0, 3.0], 2: [1.0]}}, "a title")
    (axis,) = figures[0].axes
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert legend == [*(f"{name}, predicted" for name in curves), "ideal", "pure sample, measured"]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("ranks", "ms per step")
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "2"]
    assert axis.get_title() == "strong scaling" and figures[0].get_suptitle() == "a title"
    colours = {line.get_label(): line.get_color() for line in axis.lines if "predicted" in str(line.get_label())}
    expected = ("tab:blue", "tab:orange", "tab:green")
    assert colours == {f"{name}, predicted": colour for name, colour in zip(curves, expected, strict=True)}


@pytest.mark.parametrize("memory", [1.0, float("inf")])
def test_hollow_markers_are_explained_where_there_is_a_limit(memory: float) -> None:
    axis = Figure().add_subplot()
    picture.draw_scaling(axis, Scaling({"planned": {1: ScalingPoint(4.0, 3.0), 2: ScalingPoint(2.5, 2.0)}}), memory)
    assert axis.get_title() == "strong scaling" + (" (hollow: does not fit)" if memory == 1.0 else "")


def test_ideal_times_begin_where_the_plans_do() -> None:
    axis = Figure().add_subplot()
    picture.draw_scaling(
        axis,
        Scaling({"planned": {2: ScalingPoint(4.0, 1.0), 4: ScalingPoint(3.0, 1.0), 8: ScalingPoint(2.5, 1.0)}}),
        9.0,
    )
    (ideal,) = (line for line in axis.lines if line.get_label() == "ideal")
    assert list(ideal.get_ydata()) == pytest.approx([4000, 2000, 1000])

"""Figures of matplotlib as text: axes and their places, labels, limits, and all artists with data and style."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

from tests.jobs.approved import assert_approved

MOST_NUMBERS = 48
"""Longer data are described by a weighted sum, too."""


def numbers(values: Any) -> str:
    """Return numbers with four digits; of many the shape, the first ones, and a sum with a weight for each."""
    array = np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan).ravel()
    text = " ".join(f"{value + 0.0:.4g}" for value in array[: MOST_NUMBERS if array.size <= MOST_NUMBERS else 9])
    if array.size <= MOST_NUMBERS:
        return text
    weighted = (np.nan_to_num(array) * np.cos(np.arange(array.size))).sum()
    return f"{list(np.shape(values))} {text} ... {weighted:.4g}"


def colour(value: Any) -> str:
    """Return a color with its transparency."""
    return to_hex(value, keep_alpha=True)


def describe_ticks(axis: Any) -> str:
    """Return scale, grid and style of an axis, with the ticks and labels that code has set."""
    labels, lines, locator, formatter = (
        *(axis.get_ticklabels(), axis.get_gridlines()),
        *(axis.get_major_locator(), axis.get_major_formatter()),
    )
    words = [axis.get_scale()]
    if isinstance(locator, FixedLocator):
        words.append(f"ticks {numbers(locator())} {[label.get_text() for label in labels]}")
    elif hasattr(formatter, "fmt"):
        words.append(formatter.fmt + axis.get_minor_formatter().fmt)
    words.append(f"{labels[0].get_fontsize():g} rotated by {labels[0].get_rotation():g}" if labels else "no labels")
    if lines and lines[0].get_visible():
        words.append(f"grid {colour(lines[0].get_color())} {lines[0].get_alpha()}")
    return ", ".join(words)


def describe_artists(axes: Any) -> Iterator[str]:
    """Yield a line for each line, patch, collection, image and text of axes."""
    for line in axes.lines:
        style = f"{colour(line.get_color())} {line.get_linestyle()} {line.get_linewidth():g}"
        style += f" {line.get_marker()} {line.get_markersize():g} {line.get_fillstyle()} z {line.get_zorder():g}"
        yield f"line {str(line.get_label())!r} {style}: {numbers(line.get_xdata())}; {numbers(line.get_ydata())}"
    boxes: dict[str, list[float]] = {}
    for patch in axes.patches:
        style = f"{str(patch.get_label())!r} {colour(patch.get_facecolor())} {colour(patch.get_edgecolor())}"
        style += f" {patch.get_linewidth():g} z {patch.get_zorder():g}"
        box = patch.get_path().transformed(patch.get_patch_transform()).get_extents().bounds
        boxes.setdefault(style, []).extend(box)
    yield from (f"patches {style}: {numbers(found)}" for style, found in boxes.items())
    for each in axes.collections:
        data = getattr(each, "_offsets3d", None) or (each.get_offsets(), *(p.vertices for p in each.get_paths()[:1]))
        values = () if each.get_array() is None else each.get_array()
        yield f"{type(each).__name__} {numbers(each.get_linewidth())}: {'; '.join(map(numbers, (*data, values)))}"
    for image in axes.images:
        style = f"{image.get_cmap().name} {numbers(image.get_clim())} {image.origin} {image.get_interpolation()}"
        yield f"image {style}: {numbers(image.get_array())}"
    texts: dict[str, list[str]] = {}
    for text in axes.texts:
        style = f"{text.get_fontsize():g} {text.get_ha()} {text.get_va()} {colour(text.get_color())}"
        at = text.xy if isinstance(text, Annotation) else text.get_position()
        texts.setdefault(f"{style} z {text.get_zorder():g}", []).append(f"{text.get_text()!r} {numbers(at)}")
    yield from (f"texts {style}: {'; '.join(found)}" for style, found in texts.items())


def describe(figure: Any) -> Iterator[str]:
    """Yield the lines that describe a figure."""
    title = figure.get_suptitle()
    yield f"figure {numbers(figure.get_size_inches())} {figure.get_layout_engine().__class__.__name__}: {title!r}"
    for axes in figure.axes:
        place = axes.get_subplotspec()
        if place is None:
            yield f"axes {axes.get_label()} shrunk by {axes._colorbar_info['shrink']}"
        else:
            grid = place.get_gridspec()
            rows = f"{place.rowspan.start}:{place.rowspan.stop} of {numbers(grid.get_height_ratios() or ())}"
            columns = f"{place.colspan.start}:{place.colspan.stop} of {numbers(grid.get_width_ratios() or ())}"
            yield f"axes rows {rows}, columns {columns}"
        title, shown = axes.title, "on" if axes.axison else "off"
        style = f"{title.get_fontsize():g} {colour(title.get_color())}"
        yield f"  title {title.get_text()!r} {style}, {shown}, aspect {axes.get_aspect()}"
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            limits = numbers(axis.get_view_interval())
            yield f"  {name} {axis.get_label_text()!r} {limits}, {describe_ticks(axis)}"
        yield from (f"  {line}" for line in describe_artists(axes))
        legend = axes.get_legend()
        if legend is not None:
            texts = [text.get_text() for text in legend.get_texts()]
            size = legend.get_texts()[0].get_fontsize() if texts else 0
            box = legend.get_bbox_to_anchor().transformed(axes.transAxes.inverted()).bounds
            yield f"  legend {texts} {size:g} at {legend._loc} of {numbers(box)}"


def approve_figures(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[Any]:
    """Compare each figure of ``module`` with the approved text ``figures/NAME-NUMBER``, write none, and return them."""
    figures: list[Any] = []

    def write_picture(path: Any, figure: Any, dpi: int) -> None:
        figures.append(figure)
        text = "\n".join([f"{path}, {dpi} dots per inch", *describe(figure)])
        assert_approved(f"figures/{name}-{len(figures)}", text)

    monkeypatch.setattr(module, "write_picture", write_picture)
    return figures

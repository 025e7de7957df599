"""Figure of a staleness experiment: learning curves, and accuracy over the percentage of stale weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distconv.whole_files import write_picture

from .table import VariantRow


def draw(path: Path, rows: Sequence[VariantRow], title: str) -> None:
    """Draw the learning curves of all variants, and their accuracies over the percentage of stale weights.

    Parameters
    ----------
    path : pathlib.Path
        File of the figure.
    rows : sequence of VariantRow
    title : str

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which keeps figures and may open a display.
    figure = Figure(figsize=(12.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    curves, shares = figure.subplots(1, 2)
    for index, row in enumerate(rows):
        _draw_row(curves, shares, row, f"C{index}")
    curves.set(xlabel="iteration", ylabel="test accuracy (%), mean over seeds", title="learning curves")
    shares.set(
        xlabel="stale weights (%)",
        ylabel="test accuracy (%), mean and standard error",
        title="against the percentage of stale weights",
    )
    curves.legend(fontsize=8)
    write_picture(path, figure, dpi=110)


def _draw_row(curves: Any, shares: Any, row: VariantRow, colour: str) -> None:
    points = row.curve()
    curves.plot([at for at, _ in points], [100 * value for _, value in points], "o-", color=colour, label=row.variant)
    error = 100 * row.error if row.error is not None else None
    shares.errorbar(100 * row.stale_share, 100 * row.mean, error, fmt="o", color=colour, capsize=3)

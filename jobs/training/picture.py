"""The figure drawn at the end of a classifier's training: curves of loss and accuracy, and examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from distconv.whole_files import write_picture


@dataclass(frozen=True, eq=False)
class ClassifiedExample:
    """The values of a sample, its class, and the class predicted."""

    values: NDArray[Any]
    label: object
    predicted: object


@dataclass(frozen=True)
class ResultFigure:
    """Layout of the figure: curves above rows of examples.

    Parameters
    ----------
    columns : int
        Examples per row.
    row_inches : float
        Height of a row of examples in inches.
    curves : float
        Height of the curves, relative to a row of examples.
    show : callable
        Draws the values of an example on matplotlib axes.
    projection : str, optional
        Projection of the examples' axes, such as ``3d``.
    """

    columns: int
    row_inches: float
    curves: float
    show: Callable[[Any, NDArray[Any]], None]
    projection: str | None = None

    def draw(
        self,
        path: str | os.PathLike[str],
        examples: Sequence[ClassifiedExample],
        lines: Sequence[dict[str, Any]],
        title: str,
    ) -> None:
        """Draw the figure and write it to ``path``.

        Parameters
        ----------
        path : str or os.PathLike
            File to write.
        examples : sequence of ClassifiedExample
        lines : sequence of dict
            Lines of metrics.jsonl.
        title : str

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns, rows = self.columns, -(-len(examples) // self.columns)
        figure = Figure(figsize=(12.0, 4.0 + self.row_inches * rows), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title)
        grid = figure.add_gridspec(rows + 1, columns, height_ratios=[self.curves] + [1] * rows)
        draw_losses(figure.add_subplot(grid[0, : columns // 2]), lines)
        draw_accuracies(figure.add_subplot(grid[0, columns // 2 :]), lines)
        for index, example in enumerate(examples):
            axis = figure.add_subplot(grid[1 + index // columns, index % columns], projection=self.projection)
            self.show(axis, example.values)
            name_example(axis, example.label, example.predicted)
        write_picture(path, figure, dpi=110)


def name_example(axis: Any, label: object, predicted: object) -> None:
    """Write the predicted class above an example, or in red both classes if the prediction is wrong.

    Parameters
    ----------
    axis : Any
        Matplotlib axes to draw on.
    label : object
    predicted : object
    """
    right = label == predicted
    text = f"{predicted}" if right else f"{predicted}, not {label}"
    axis.set_title(text, fontsize=9, color="tab:green" if right else "tab:red")


def draw_losses(axis: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Draw the losses of the steps and evaluations in ``lines`` of metrics.jsonl.

    Parameters
    ----------
    axis : Any
        Matplotlib axes to draw on.
    lines : sequence of dict
        Lines of metrics.jsonl.
    """
    steps = [line for line in lines if "evaluation" not in line]
    axis.plot([line["step"] for line in steps], [line["loss"] for line in steps], color="0.7", linewidth=0.8)
    axis.plot([], [], color="0.7", label="training, each step")
    for group in ("train", "test"):
        evaluations = [line for line in lines if line.get("evaluation") == group]
        axis.plot(
            [line["step"] for line in evaluations],
            [line["loss"] for line in evaluations],
            "o-",
            label=f"all of {group}",
        )
    axis.set(xlabel="step", ylabel="loss", yscale="log")
    axis.legend(fontsize=8)


def draw_accuracies(axis: Any, lines: Sequence[dict[str, Any]]) -> None:
    """Draw the accuracies of the evaluations in ``lines`` of metrics.jsonl.

    Parameters
    ----------
    axis : Any
        Matplotlib axes to draw on.
    lines : sequence of dict
        Lines of metrics.jsonl.
    """
    for group in ("train", "test"):
        evaluations = [line for line in lines if line.get("evaluation") == group]
        percent = [100 * line["accuracy"] for line in evaluations]
        axis.plot([line["step"] for line in evaluations], percent, "o-", label=group)
    axis.set(xlabel="step", ylabel="accuracy (%)")
    axis.legend(fontsize=8)

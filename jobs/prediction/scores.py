"""Scores of predictions with labels, and a figure of some samples.

Both read the written file. They thus cover rows of an earlier, interrupted run. For scores no rank needs a full sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.source import SampleSource
from distconv.distribution import Box, Distribution, Interval, default_axes
from distconv.errors import DataError
from distconv.grid import ProcessGrid
from distconv.jobs.segmentation.scores import Confusion, SegmentationScores
from distconv.whole_files import write_picture

from .samples import PredictionInputs, open_predictions

SHOWN = 4
"""Maximum number of samples in the figure."""
_LARGEST = 512
"""Approximate maximum number of pixels of a map along each side."""


def score(
    path: Path, inputs: PredictionInputs, grid: ProcessGrid, ignore: int | None = None
) -> SegmentationScores | None:
    """Score the written predictions. Collective: call on every rank.

    Parameters
    ----------
    path : pathlib.Path
        File of predictions.
    inputs : PredictionInputs
        Samples and labels.
    grid : ProcessGrid
        Grid that divides the reading.
    ignore : int, optional
        Label value excluded from the scores.

    Returns
    -------
    SegmentationScores or None
        None if there are no labels.

    Raises
    ------
    DataError
        On all ranks, if labels and predictions differ in shape, or a file cannot be read.
    """
    if inputs.labels is None:
        return None
    source, name = open_predictions(path, inputs, grid.world)
    shape, labels = source.shape(name), inputs.labels.shape(inputs.label)
    if labels != (shape[0], *shape[2:]):
        raise DataError(
            f"{inputs.labels.path}: the shape of dataset {inputs.label!r} is {labels}, but that of the "
            f"predictions is {shape}"
        )
    dist = Distribution(grid, (None, *default_axes(None, len(shape))[2:])) if len(shape) > 2 else None
    classes = shape[1]
    confusion = Confusion(classes, ignore)

    def count() -> None:
        for sample in range(shape[0]):
            box = _block(dist, sample, labels, grid)
            if box is None:
                continue
            assert inputs.labels is not None
            values = source.read(name, (box[0], Interval(0, classes), *box[1:]))[0]
            label = inputs.labels.read(inputs.label, box)[0]
            called = (values[0] >= 0.5).astype(np.int64) if classes == 1 else values.argmax(0)
            confusion.add(called, label)

    try_on_all_ranks(grid.world, count, DataError)
    source.close()
    return confusion.sum_over(grid.world)


def _block(dist: Distribution | None, sample: int, shape: Sequence[int], grid: ProcessGrid) -> Box | None:
    """Return the block of a sample that this rank counts, or None.

    Samples are assigned round-robin to the ranks with the same spatial block.
    """
    if dist is None:
        return (Interval(sample, sample + 1),) if sample % grid.size == grid.rank else None
    same_block = dist.same_indices(range(1, len(shape)))
    if same_block.index(grid.rank) != sample % len(same_block):
        return None
    block = dist.box(None, (1, *shape[1:]))[1:]
    return None if 0 in (each.extent for each in block) else (Interval(sample, sample + 1), *block)


def draw(path: Path, predictions: Path, inputs: PredictionInputs, title: str) -> None:
    """Draw the first samples: input, label and prediction, or the middle slice of volumes. Call it on one rank.

    Parameters
    ----------
    path : pathlib.Path
        File to write.
    predictions : pathlib.Path
        File of predictions.
    inputs : PredictionInputs
        Samples and labels.
    title : str

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    source, name = open_predictions(predictions, inputs, MPI.COMM_SELF)
    shape = source.shape(name)
    rows = min(SHOWN, shape[0])
    figure = Figure(figsize=(10.0, 3.2 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(rows, 3, squeeze=False)
    for sample, (image, label, prediction) in enumerate(axes):
        _show(image, _map(inputs.source, inputs.name, sample, channel=True), f"sample {sample}: {inputs.name}")
        if len(shape) > 2:
            if inputs.labels is not None:
                _show(label, _map(inputs.labels, inputs.label, sample, channel=False), inputs.label)
            called = _map(source, name, sample, channel=True, classes=shape[1] > 1)
            _show(prediction, called, "class" if shape[1] > 1 else "probability")
        else:
            values = source.read(name, (Interval(sample, sample + 1), Interval(0, shape[1])))[0]
            prediction.bar(range(shape[1]), values)
            prediction.set_title(f"class {int(values.argmax())}", fontsize=9)
        for axis in (image, label):
            axis.set_axis_off()
    source.close()
    write_picture(path, figure, dpi=110)


def _map(source: SampleSource, name: str, sample: int, *, channel: bool, classes: bool = False) -> NDArray[Any]:
    """Return the map (H, W) to draw of a sample: the first channel, or the class with the largest value."""
    shape = source.shape(name)
    space = shape[2:] if channel else shape[1:]
    middle = [Interval(extent // 2, extent // 2 + 1) for extent in space[:-2]]
    box = [*middle, *(Interval(0, extent) for extent in space[-2:])]
    channels = [Interval(0, shape[1] if classes else 1)] if channel else []
    values = source.read(name, (Interval(sample, sample + 1), *channels, *box))[0]
    if channel:
        values = values.argmax(0) if classes else values[0]
    flat = values.reshape(*values.shape[-2:]) if len(space) > 1 else values.reshape(1, -1)
    steps = (slice(None, None, max(1, extent // _LARGEST)) for extent in flat.shape)
    return np.asarray(flat[tuple(steps)])


def _show(axis: Any, values: NDArray[Any], title: str) -> None:
    axis.imshow(values, aspect="auto" if values.shape[0] == 1 else "equal")
    axis.set_title(title, fontsize=9)

"""Speed-ups of single convolutions that the paper prints (VI-A), and what the model predicts for them.

The text prints three numbers and compares other layers in words. All are held out. The times exclude the all-reduce of
dL/dw. The text prints neither the grids nor the sizes of the layers, except those of ResNet-50's conv1.

Source: Dryden et al. 2019, VI-A, Figures 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from distconv.jobs.papers.dryden.published import PrintedRatio
from distconv.jobs.planning.single_layers import PaperLayer, predict_times
from distconv.perfmodel.machine.machine import Machine
from distconv.plan import format_parts

Grid = Mapping[str, int]
"""Number of ranks by axis of the process grid."""

SQUARES: Mapping[int, Grid] = {2: {"h": 2}, 4: {"h": 2, "w": 2}, 8: {"h": 4, "w": 2}, 16: {"h": 4, "w": 4}}
SLABS: Mapping[int, Grid] = {gpus: {"h": gpus} for gpus in SQUARES}
"""Nearly square grids and slabs by number of GPUs. VI-A does not state its grids, so the page has both."""


@dataclass(frozen=True)
class MeasuredLayer:
    """A convolution of VI-A with its sizes and its published speed-up."""

    name: str
    layer: PaperLayer
    source: str
    """Source of the sizes."""
    ratio: PrintedRatio | None = None
    """Published speed-up, or None if the text prints no number for the layer."""


RECALLED = "recalled from Figure 3, not in the text"
OURS = "our mesh2k"
"""Sources of sizes, as the page prints them."""

CONV1, CONV1_1, CONV6_1 = PrintedRatio(1.35, 8), PrintedRatio(14.8, 16), PrintedRatio(1.4, None)

# Layers of the 2K mesh network are listed twice, with two assumptions on the sizes that the text does not print.
LAYERS = (
    MeasuredLayer("conv1", PaperLayer(3, 224, 64, 7, stride=2), "ResNet-50", CONV1),
    MeasuredLayer("res3b_branch2a", PaperLayer(512, 28, 128, 1), "ResNet-50"),
    MeasuredLayer("conv1_1", PaperLayer(18, 2048, 128, 5, stride=2), RECALLED, CONV1_1),
    MeasuredLayer("conv1_1", PaperLayer(18, 2048, 128, 3, stride=2), OURS, CONV1_1),
    MeasuredLayer("conv6_1", PaperLayer(384, 64, 128, 3, stride=2), RECALLED, CONV6_1),
    MeasuredLayer("conv6_1", PaperLayer(128, 64, 128, 3, stride=2), OURS, CONV6_1),
)

SINGLE = tuple((LAYERS[number], gpus) for number, gpus in ((0, 8), (2, 16), (4, 16)))
"""A layer for each printed ratio, and its number of GPUs. The page compares other forms of the model on them."""


def speedups(machine: Machine, layer: PaperLayer, grid: Grid) -> tuple[float, float, float]:
    """Return the speed-ups of FP, of BP and of both at N=1, over one GPU.

    Parameters
    ----------
    machine : Machine
    layer : PaperLayer
    grid : Grid

    Returns
    -------
    (float, float, float)
    """
    alone = predict_times(layer, 1, {}, 1, machine)
    split = predict_times(layer, 1, grid, math.prod(grid.values()), machine)
    # The ratio of the sums, not the mean of the ratios: the paper's numbers are for "forward and backpropagation".
    both = sum(alone.values()) / sum(split.values())
    return alone["FP"] / split["FP"], alone["BP"] / split["BP"], both


def section(machine: Machine) -> Iterator[str]:
    """Yield the lines of the page: published and predicted speed-ups of each layer by GPUs and grid."""
    yield INTRODUCTION
    yield "| layer | extents | of | GPUs | printed | nearly square: FP, BP, both (error) | slabs: the same |"
    yield "|---|---|---|---|---|---|---|"
    for row in LAYERS:
        p = row.layer
        extents = f"C={p.channels}, {p.extent}^2, F={p.filters}, K={p.kernel}, S={p.stride}"
        for gpus in SQUARES:
            printed = _printed(row, gpus)
            cells = (_cell(machine, row, grids[gpus], printed) for grids in (SQUARES, SLABS))
            shown = "" if printed is None else f"{printed:g}"
            yield f"| {row.name} | {extents} | {row.source} | {gpus} | {shown} | {' | '.join(cells)} |"
    yield from ("", WORDS, "")


def _printed(layer: MeasuredLayer, gpus: int) -> float | None:
    """Return the printed ratio if it is for ``gpus`` GPUs, or for a number that the text does not name."""
    return layer.ratio.ratio if layer.ratio is not None and layer.ratio.gpus in (gpus, None) else None


def _cell(machine: Machine, layer: MeasuredLayer, grid: Grid, printed: float | None) -> str:
    *phases, both = speedups(machine, layer.layer, grid)
    error = "" if printed is None else f" ({both / printed - 1:+.0%})"
    return f"{format_parts(dict(grid))}: {phases[0]:.2f}, {phases[1]:.2f}, {both:.2f}{error}"


INTRODUCTION = """\
Speed-ups over one GPU at N=1, with halo exchanges overlapped and without the all-reduce. Nothing is fitted to these
layers, but the form of the model was chosen with knowledge of the three printed ratios ([other
choices](paper-tables.md#other-choices)). The text states neither the grids nor, for the speed-up 1.4 of conv6_1, the
number of GPUs, so that each of its rows is compared with 1.4. Of the mesh network it states the size of the input, and
that kernels are 3x3. Sizes marked *recalled* come from captions of the published Figure 3, which our copy of the paper
lacks. They are tested here, and no conclusion depends on them.
"""

WORDS = """\
What the paper says in words, and what the model predicts:

- conv1: "forward propagation does not scale well", "backpropagation fares better", and "performance degrades somewhat
  with 16 GPUs". The model agrees, except that on slabs 16 GPUs are faster than 8.
- res3b_branch2a: forward "does not show significant performance improvements beyond two GPUs"; the model is wrong here
  and predicts a gain up to 8 GPUs. "Backpropagation shows improvements up to 16 GPUs"; the model predicts a gain up to
  8.
- conv6_1: "continued benefit". The model's gain is too large from 8 GPUs on, by 40 % and more for both sets of sizes. A
  result of 131,072 elements becomes smaller than the smallest tiles of cuDNN, but tiles of the model continue to
  shrink. Constant tiles (exponent 1 under [other choices](paper-tables.md#other-choices)) are closer for this layer and
  too slow for conv1.
"""

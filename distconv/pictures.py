"""``show``: a picture of the blocks of a tensor on each rank, the ranks of a grid, or the grids of a plan.

The picture is a table for a terminal and an SVG figure for a notebook. Nothing is communicated: which rank owns what
follows from the distribution.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from mpi4py import MPI

from distconv.arrangement import Arrangement
from distconv.distribution import Distribution
from distconv.errors import DistributionError
from distconv.grid import ProcessGrid
from distconv.plan import Plan, format_parts
from distconv.svg import MUTED, Drawing, color_of
from distconv.tensor import DistTensor

MOST_RANKS = 256
"""Maximum number of ranks of a picture: more would not be readable."""


class Panel(NamedTuple):
    """A table of a picture: the ranks that have each combination of a row and a column."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """The ranks of each cell, by row and column."""
    heights: tuple[int, ...]
    """Relative heights of the rows in a figure."""
    widths: tuple[int, ...]
    """Relative widths of the columns."""


class Picture:
    """A picture that :func:`show` makes: ``str()`` gives a table, notebooks display the figure of :meth:`svg`.

    Parameters
    ----------
    title : str
    panels : sequence of Panel

    Attributes
    ----------
    title, panels
        As the parameters.
    """

    def __init__(self, title: str, panels: Sequence[Panel]) -> None:
        self.title, self.panels = title, tuple(panels)

    def __repr__(self) -> str:
        return f"<Picture of {self.title}>"

    def __str__(self) -> str:
        return "\n".join([self.title, *itertools.chain.from_iterable(map(_table, self.panels))])

    def svg(self) -> str:
        """Return the picture as an SVG figure.

        Returns
        -------
        str
        """
        return _draw(self)

    _repr_svg_ = svg


def show(
    what: DistTensor | Distribution | Arrangement | ProcessGrid | Plan, shape: Sequence[int] | None = None
) -> Picture:
    """Show which rank has which part of a tensor, the ranks of a grid, or the grids of a plan.

    In a notebook the returned picture is displayed as a figure. Elsewhere rank 0 of the grid prints it as a table, or
    rank 0 of the job for an object without a communicator. Not collective: any rank may call it alone.

    Parameters
    ----------
    what : DistTensor, Distribution, ProcessGrid, Arrangement or Plan
        The object to show.
    shape : sequence of int, optional
        Global shape of the tensor; required for a Distribution, which has none, and for nothing else.

    Returns
    -------
    Picture
        ``str(picture)`` is the table and ``picture.svg()`` the figure.

    Raises
    ------
    DistributionError
        If ``shape`` is missing, given for another object, or does not fit, or the object cannot be shown, or it has
        more than 256 ranks.

    Examples
    --------
    >>> from distconv.arrangement import Arrangement
    >>> _ = show(Distribution(Arrangement(n=2, h=2), "nchw"), shape=(3, 1, 5, 8))
    tensor (3, 1, 5, 8) over n=2,h=2
               h 0:3   h 3:5
      n 0:2   rank 0  rank 1
      n 2:3   rank 2  rank 3
    """
    if isinstance(what, DistTensor) and shape is None:
        picture = _picture_of_tensor(what.dist, tuple(what.shape))
    elif isinstance(what, Distribution) and shape is not None:
        picture = _picture_of_tensor(what, tuple(shape))
    elif isinstance(what, Arrangement) and shape is None:
        picture = Picture(f"process grid {what.describe()}", [_grid_panel("", what)])
    elif isinstance(what, Plan) and shape is None:
        picture = _picture_of_plan(what)
    else:
        given = "without shape" if shape is None else "with shape"
        raise DistributionError(
            f"show: {type(what).__name__} {given} cannot be shown. Pass a DistTensor, a ProcessGrid, a Plan, or a "
            "Distribution with shape=."
        )
    if not _is_notebook() and _is_first_rank(what):
        print(picture)
    return picture


def _is_notebook() -> bool:
    # Not imported here: a notebook has it loaded already.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def _is_first_rank(what: object) -> bool:
    """Return True on rank 0 of the grid, or of the job for an object without a communicator."""
    grid = getattr(getattr(what, "dist", what), "grid", what)
    return grid.rank == 0 if isinstance(grid, ProcessGrid) else MPI.COMM_WORLD.rank == 0


def _check_size(ranks: int) -> None:
    if ranks > MOST_RANKS:
        raise DistributionError(f"show: {ranks} ranks are too many for a picture. Show a grid of at most {MOST_RANKS}.")


def _picture_of_tensor(dist: Distribution[Arrangement], shape: tuple[int, ...]) -> Picture:
    if len(shape) != len(dist.axes):
        raise DistributionError(f"show: {dist} has {len(dist.axes)} dimensions but shape={shape} has {len(shape)}.")
    _check_size(dist.grid.size)
    split = [dim for dim, axis in enumerate(dist.split) if axis is not None]
    *outer, row, column = [None] * (2 - len(split)) + split  # the last two split dimensions are rows and columns
    panels = []
    for indices in itertools.product(*(range(_parts(dist, dim)) for dim in outer)):
        chosen = dict(zip(outer, indices, strict=True))
        rows, columns = range(_parts(dist, row)), range(_parts(dist, column))
        cells = tuple(tuple(_ranks_at(dist, {**chosen, row: one, column: other}) for other in columns) for one in rows)
        panels.append(
            Panel(
                ", ".join(_label(dist, shape, dim, index) for dim, index in chosen.items()),
                tuple(_label(dist, shape, row, index) for index in rows),
                tuple(_label(dist, shape, column, index) for index in columns),
                cells,
                tuple(_extent(dist, shape, row, index) for index in rows),
                tuple(_extent(dist, shape, column, index) for index in columns),
            )
        )
    return Picture(f"tensor {shape} over {dist.grid.describe()}", panels)


def _parts(dist: Distribution[Arrangement], dim: int | None) -> int:
    axis = None if dim is None else dist.split[dim]
    return 1 if axis is None else dist.grid.shape[axis]


def _label(dist: Distribution[Arrangement], shape: Sequence[int], dim: int | None, index: int) -> str:
    """Return the axis and the global indices of a block, such as ``h 0:25``; "" for a dimension that is not split."""
    if dim is None:
        return ""
    ranges = [f"{each.start}:{each.stop}" for each in dist.intervals(dim, index, shape[dim])]
    return f"{dist.split[dim]} {','.join(ranges[:3]) or '-'}{',...' * (len(ranges) > 3)}"


def _extent(dist: Distribution[Arrangement], shape: Sequence[int], dim: int | None, index: int) -> int:
    return 1 if dim is None else sum(each.extent for each in dist.intervals(dim, index, shape[dim]))


def _ranks_at(dist: Distribution[Arrangement], indices: dict[int | None, int]) -> tuple[int, ...]:
    """Return the ranks that have the blocks with these numbers, by dimension: one, or several replicas."""
    wanted = {dist.split[dim]: index for dim, index in indices.items() if dim is not None}
    coords = (dist.grid.coords_of(rank) for rank in range(dist.grid.size))
    return tuple(rank for rank, at in enumerate(coords) if all(at[axis] == i for axis, i in wanted.items() if axis))


def _grid_panel(title: str, grid: Arrangement) -> Panel:
    """Return the ranks of a grid: columns along its last axis, rows for all combinations of the others."""
    _check_size(grid.size)
    axes = [axis for axis in grid.split_axes(grid.shape) if grid.shape[axis] > 1]
    *outer, last = axes or ["n"]
    rows = list(itertools.product(*(range(grid.shape[axis]) for axis in outer)))
    columns = range(grid.shape[last])
    cells = tuple(
        tuple((grid.rank_of({**dict(zip(outer, row, strict=True)), last: column}),) for column in columns)
        for row in rows
    )
    labels = tuple(" ".join(f"{axis}={i}" for axis, i in zip(outer, row, strict=True)) for row in rows)
    return Panel(title, labels, tuple(f"{last}={i}" for i in columns), cells, (1,) * len(rows), (1,) * len(columns))


def _picture_of_plan(plan: Plan) -> Picture:
    products = [math.prod(parts.values()) for parts in plan.layers.values()]
    ranks = plan.ranks or math.lcm(*products)
    panels = []
    for (pattern, parts), product in zip(plan.layers.items(), products, strict=True):
        grid = Arrangement(**{**parts, "r": parts.get("r", 1) * (ranks // product)})
        panels.append(_grid_panel(f"layers {pattern!r}: {format_parts(parts)}", grid))
    return Picture(f"plan for {ranks} ranks", panels)


def _name(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, ranks)) if ranks else "-"


def _table(panel: Panel) -> list[str]:
    """Return the lines of a panel in text."""
    cells = [[_name(ranks) for ranks in row] for row in panel.ranks]
    columns = [max(map(len, [title, *column])) for title, *column in zip(panel.columns, *cells, strict=True)]
    first = max(map(len, panel.rows))
    lines = [f"  {panel.title}"] if panel.title else []
    if any(panel.columns):
        titles = "  ".join(title.rjust(width) for title, width in zip(panel.columns, columns, strict=True))
        lines.append(f"  {'':{first}}   {titles}")
    for label, row in zip(panel.rows, cells, strict=True):
        names = "  ".join(name.rjust(width) for name, width in zip(row, columns, strict=True))
        lines.append(f"  {label:{first}}   {names}")
    return lines


WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 140, 90, 44, 20
"""Pixels: width and height of a panel, space for row labels and for titles, and space between panels."""


def _draw(picture: Picture) -> str:
    """Return a picture as SVG: panels below each other, blocks in proportion to their sizes where this can be read."""
    panels = [
        (panel, _lengths(panel.heights, HEIGHT, 22), _lengths(panel.widths, WIDTH, 64)) for panel in picture.panels
    ]
    width = LEFT + max(sum(widths) for _, _, widths in panels) + 24
    height = TOP + sum(sum(heights) + TOP + GAP for _, heights, _ in panels)
    drawing = Drawing(max(width, 8 * len(picture.title) + 40), height, str(picture))
    drawing.text(16, 26, picture.title, size=15, anchor="start", bold=True)
    top = float(TOP)
    for panel, heights, widths in panels:
        drawing.text(16, top + 14, panel.title, anchor="start")
        top += TOP - 8
        for label, x, cell in zip(panel.columns, itertools.accumulate(widths, initial=LEFT), widths, strict=False):
            drawing.text(x + cell / 2, top - 6, label, size=12, color=MUTED)
        for label, row, y, cell_height in zip(
            panel.rows, panel.ranks, itertools.accumulate(heights, initial=top), heights, strict=False
        ):
            drawing.text(LEFT - 8, y + cell_height / 2 + 4, label, size=12, anchor="end", color=MUTED)
            for ranks, x, cell in zip(row, itertools.accumulate(widths, initial=LEFT), widths, strict=False):
                drawing.rectangle(x, y, cell, cell_height, fill=color_of(ranks[0]) if ranks else "none")
                drawing.text(x + cell / 2, y + cell_height / 2 + 4, _name(ranks), size=12)
        top += sum(heights) + GAP + 8
    return str(drawing)


def _lengths(extents: Sequence[int], total: float, least: float) -> list[float]:
    """Return lengths in proportion to sizes, which sum to ``total`` unless some are raised to ``least``."""
    # Empty blocks and tensors are drawn, too.
    return [max(least, total * extent / max(1, sum(extents))) for extent in extents]

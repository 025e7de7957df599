"""Figures of blocks, halos, channels and redistributions, drawn from the distributions and routes that compute them."""

from __future__ import annotations

from collections.abc import Callable

from distconv.arrangement import Arrangement
from distconv.communication.routes import Needs, Routes
from distconv.distribution import Distribution, Interval
from distconv.svg import COLORS, MUTED, Drawing, color_of

CELL = 22
"""Side of a pixel of a tensor in the figures."""


def process_grid() -> Drawing:
    """Draw which rank owns which samples and rows on the grid n=2, h=2."""
    shape = (4, 3, 6, 6)
    dist = Distribution(Arrangement(n=2, h=2), "nchw")
    drawing = Drawing(
        640,
        270,
        "Four samples of 3 channels and 6 x 6 pixels on the process grid n=2, h=2. Ranks 0 and 1 own the upper and "
        "lower three rows of samples 0 and 1, ranks 2 and 3 those of samples 2 and 3. Every rank owns all channels "
        "and columns.",
    )
    drawing.text(20, 30, "x of shape (N=4, C=3, H=6, W=6) on ProcessGrid(n=2, h=2)", size=16, anchor="start", bold=True)
    side = 18
    for sample in range(shape[0]):
        left = 30 + 150 * sample
        for channel in reversed(range(shape[1])):
            x, y = left + 7 * channel, 80 - 7 * channel
            for row in range(shape[2]):
                (owner,) = dist.owners((sample, channel, row, 0), shape)
                drawing.rectangle(x, y + side * row, side * shape[3], side, fill=color_of(owner), stroke=MUTED)
        for rows in {tuple(dist.box(rank, shape)[2]) for rank in range(4)}:
            (owner,) = dist.owners((sample, 0, rows[0], 0), shape)
            middle = 80 + side * (rows[0] + rows[1]) / 2
            drawing.text(left + side * shape[3] / 2, middle + 5, f"rank {owner}", size=15, bold=True)
        drawing.text(left + side * shape[3] / 2, 80 + side * shape[2] + 24, f"sample {sample}", size=15)
    for rank in range(4):
        samples, _, rows, _ = dist.box(rank, shape)
        drawing.text(
            30 + 150 * rank,
            250,
            f"rank {rank}: n {samples.start}:{samples.stop}, h {rows.start}:{rows.stop}",
            size=13,
            anchor="start",
        )
    return drawing


def uneven_blocks() -> Drawing:
    """Draw 10 rows and 3 rows over four ranks."""
    drawing = Drawing(
        640,
        330,
        "Rows of two tensors over h=4. Ten rows: ranks 0 and 1 own three rows, ranks 2 and 3 two. Three rows: ranks "
        "0 to 2 own one row each and rank 3 owns none, but takes part in all communication.",
    )
    for left, rows in ((40, 10), (320, 3)):
        dist, shape = Distribution(Arrangement(h=4), ("h", None)), (rows, 6)
        drawing.text(left, 34, f"H={rows} over h=4", size=16, anchor="start", bold=True)
        for rank in range(4):
            own = dist.box(rank, shape)[0]
            for row in range(own.start, own.stop):
                drawing.rectangle(left, 50 + 26 * row, 150, 26, fill=color_of(rank), stroke=MUTED)
                drawing.text(left - 8, 50 + 26 * row + 18, str(row), size=13, anchor="end", color=MUTED)
            words = f"rank {rank}: {own.start}:{own.stop}" + ("" if own.extent else ", no rows")
            y = 50 + 13 * (own.start + own.stop) + 5 if own.extent else 50 + 26 * rows + 20
            drawing.text(left + 160, y, words, size=14, anchor="start")
    return drawing


def halo_forward() -> Drawing:
    """Draw the halo exchange of a 3x3 convolution on the grid h=2, w=2, as rank 0 sees it."""
    return _halo(
        "Forward: rank 0 receives the pixels that its outputs need",
        "An 8 x 8 image on the grid h=2, w=2. The outputs of rank 0 need one more row and column than it owns. It "
        "receives 4 pixels from rank 1, 4 from rank 2 and the corner pixel from rank 3, each in one message.",
        backward=False,
    )


def halo_backward() -> Drawing:
    """Draw the reverse exchange of the gradient of the input."""
    return _halo(
        "Backward: rank 0 sends gradients, and their owners add them",
        "The same image in the backward pass. Rank 0 has computed gradients of the halo pixels. It sends 4 of them to "
        "rank 1, 4 to rank 2 and 1 to rank 3, which add them to the gradients of their own pixels.",
        backward=True,
    )


def _halo(title: str, words: str, backward: bool) -> Drawing:
    shape = (8, 8)
    dist = Distribution(Arrangement(h=2, w=2), ("h", "w"))
    needs = _needs_of_3x3(dist, shape)
    routes = Routes(dist, needs, shape, 0, ghosts=True)
    drawing = Drawing(640, 330, words)
    drawing.text(20, 30, title, size=15, anchor="start", bold=True)
    gap, left, top = 60, 40, 60

    def corner(rank: int) -> tuple[float, float]:
        rows, columns = dist.box(rank, shape)
        return left + CELL * columns.start + gap * (columns.start > 0), top + CELL * rows.start + gap * (rows.start > 0)

    for rank in range(4):
        x, y = corner(rank)
        rows, columns = dist.box(rank, shape)
        for row in range(rows.extent):
            for column in range(columns.extent):
                drawing.rectangle(x + CELL * column, y + CELL * row, CELL, CELL, fill=color_of(rank), stroke="#ffffff")
        drawing.rectangle(x, y, CELL * columns.extent, CELL * rows.extent)
        drawing.text(x + CELL * columns.extent / 2, y + CELL * rows.extent / 2 + 5, f"rank {rank}", size=14, bold=True)
    x0, y0 = corner(0)
    for slab in routes.destinations:  # [1] the halo of rank 0, in the color of the owners
        for row in range(slab[0].start, slab[0].stop):
            for column in range(slab[1].start, slab[1].stop):
                (owner,) = dist.owners((row, column), shape)
                x, y = x0 + CELL * column, y0 + CELL * row
                drawing.rectangle(x, y, CELL, CELL, fill=color_of(owner), dashed=True)
    for peer in routes.receives:  # [2] a message from each owner
        box = peer.boxes[0]
        x, y = corner(peer.rank)
        source = (
            x + CELL * (box.src[1].start + box.src[1].stop) / 2,
            y + CELL * (box.src[0].start + box.src[0].stop) / 2,
        )
        slab = routes.destinations[box.destination]
        target = (
            x0 + CELL * (slab[1].start + (box.dst[1].start + box.dst[1].stop) / 2),
            y0 + CELL * (slab[0].start + (box.dst[0].start + box.dst[0].stop) / 2),
        )
        ends = (*target, *source) if backward else (*source, *target)
        drawing.line(*ends, arrow=True)
    drawing.text(350, 90, "messages of rank 0", size=15, anchor="start", bold=True)
    for line, peer in enumerate(routes.receives):
        what = "sends {} gradients to" if backward else "receives {} pixels from"
        drawing.text(350, 116 + 24 * line, f"{what.format(peer.numel)} rank {peer.rank}", size=14, anchor="start")
    box = needs.intervals(0, 0, shape[0]) + needs.intervals(1, 0, shape[1])
    rows, columns = box
    drawing.text(350, 214, "dashed: the halo of rank 0", size=14, anchor="start", color=MUTED)
    drawing.text(
        350,
        238,
        f"needed: h {rows.start}:{rows.stop}, w {columns.start}:{columns.stop}",
        size=14,
        anchor="start",
        color=MUTED,
    )
    drawing.text(350, 262, "outside the image: zero padding", size=14, anchor="start", color=MUTED)
    return drawing


def _needs_of_3x3(dist: Distribution[Arrangement], shape: tuple[int, ...]) -> Needs:
    """Return the input that a 3x3 convolution with padding 1 needs: one more index on each side of a block."""
    needed = tuple(
        (
            dim,
            tuple(
                Interval(max(0, block.start - 1), min(shape[dim], block.stop + 1))
                for index in range(dist.grid.shape[axis])
                for block in dist.intervals(dim, index, shape[dim])
            ),
        )
        for dim, axis in enumerate(dist.split)
        if axis is not None
    )
    return Needs(dist, needed)  # type: ignore[arg-type]


def redistribution() -> Drawing:
    """Draw the messages between a layer on h=4 and the next on n=4."""
    shape = (4, 8)
    src, dst = (
        Distribution(Arrangement(**grid), axes) for grid, axes in (({"h": 4}, (None, "h")), ({"n": 4}, ("n", None)))
    )
    drawing = Drawing(
        640,
        300,
        "A tensor of 4 samples and 8 rows moves from h=4 to n=4. Every rank sends 2 rows of one sample to each of "
        "the three other ranks, and keeps 2 rows of its own sample.",
    )
    for left, name, dist in ((30, "layer 1 on h=4", src), (250, "layer 2 on n=4", dst)):
        drawing.text(left, 34, name, size=16, anchor="start", bold=True)
        for sample in range(shape[0]):
            drawing.text(left + 12 + 38 * sample, 58, f"n={sample}", size=12, color=MUTED)
            for row in range(shape[1]):
                (owner,) = dist.owners((sample, row), shape)
                drawing.rectangle(left - 4 + 38 * sample, 66 + 24 * row, 34, 24, fill=color_of(owner), stroke="#ffffff")
                drawing.text(left + 13 + 38 * sample, 66 + 24 * row + 17, str(owner), size=12)
    drawing.line(196, 160, 238, 160, arrow=True)
    drawing.text(450, 34, "elements sent", size=16, anchor="start", bold=True)
    for rank in range(4):
        drawing.text(525 + 32 * rank, 62, f"to {rank}", size=12, color=MUTED)
        drawing.text(450, 88 + 32 * rank, f"rank {rank}", size=14, anchor="start")
        routes = Routes(src, dst, shape, rank)
        sent = {peer.rank: peer.numel for peer in routes.sends}
        for other in range(4):
            drawing.rectangle(511 + 32 * other, 70 + 32 * rank, 28, 26, fill="#ffffff" if other != rank else "#e4e7eb")
            drawing.text(525 + 32 * other, 88 + 32 * rank, str(sent.get(other, "-")), size=13)
    drawing.text(30, 288, "numbers in the cells: owning rank", size=13, anchor="start", color=MUTED)
    return drawing


def channels() -> Drawing:
    """Draw the two algorithms of a convolution whose channels and filters are split over c=2."""
    dist = Distribution(Arrangement(c=2), ("c",))
    drawing = Drawing(
        640,
        330,
        "A convolution with 4 channels and 6 filters on the grid c=2. gather-x: each rank gathers all channels of x "
        "and computes 3 filters. reduce-y: each rank computes partial sums of all 6 filters from its 2 channels, and "
        "the sums are reduce-scattered.",
    )
    for left, name, steps in (
        (20, "gather-x", ("all-gather x over c", "compute own filters")),
        (340, "reduce-y", ("compute all filters of own channels", "reduce-scatter partial sums over c")),
    ):
        drawing.text(left, 34, name, size=17, anchor="start", bold=True)
        for number, step in enumerate(steps, 1):
            drawing.text(left, 36 + 22 * number, f"{number}. {step}", size=14, anchor="start")
        for rank in range(2):
            top = 110 + 105 * rank
            own = dist.box(rank, (4,))[0]
            filters = dist.box(rank, (6,))[0]
            drawing.text(left, top + 44, f"rank {rank}", size=14, anchor="start", bold=True)
            for channel in range(4):
                has = own.start <= channel < own.stop
                (owner,) = dist.owners((channel,), (4,))
                used = has or name == "gather-x"
                drawing.rectangle(
                    left + 60, top + 20 * channel, 40, 18, fill=color_of(owner) if used else "none", dashed=not has
                )
            for output in range(6):
                computed = filters.start <= output < filters.stop or name == "reduce-y"
                (owner,) = dist.owners((output,), (6,))
                drawing.rectangle(
                    left + 190,
                    top - 6 + 15 * output,
                    40,
                    13,
                    fill=color_of(owner) if computed else "none",
                    dashed=name == "reduce-y",
                )
            drawing.line(left + 106, top + 40, left + 184, top + 40, arrow=True)
            words = f"{6 if name == 'reduce-y' else filters.extent} of 6 filters"
            drawing.text(left + 145, top + 32, words.split(" filters")[0], size=12, color=MUTED)
            drawing.text(left + 145, top + 56, "filters", size=12, color=MUTED)
            drawing.text(left + 240, top + 44, "partial" if name == "reduce-y" else "complete", size=12, anchor="start")
        drawing.text(left + 80, 322, "C=4", size=13, color=MUTED)
        drawing.text(left + 210, 322, "F=6", size=13, color=MUTED)
    return drawing


def batch_norm_scopes() -> Drawing:
    """Draw over which ranks batch norm computes its statistics, for each scope, on the grid n=2, h=2."""
    grid = Arrangement(n=2, h=2)
    drawing = Drawing(
        640,
        250,
        'Batch norm on the grid n=2, h=2. "global": one set of statistics over all four ranks, as in a single process. '
        '"spatial": one set for ranks 0 and 1, which hold the same samples, and one for ranks 2 and 3. "local": each '
        "rank "
        "computes its own.",
    )
    for number, (scope, axes) in enumerate((("global", ("n", "h")), ("spatial", ("h",)), ("local", ()))):
        left = 20 + 212 * number
        drawing.text(left, 34, f'batch_norm="{scope}"', size=15, anchor="start", bold=True)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(4):
            at = grid.coords_of(rank)
            groups.setdefault(tuple(at[axis] for axis in ("n", "h") if axis not in axes), []).append(rank)
        for index, ranks in enumerate(groups.values()):
            for rank in ranks:
                at = grid.coords_of(rank)
                x, y = left + 92 * at["h"], 60 + 72 * at["n"]
                drawing.rectangle(x, y, 84, 62, fill=COLORS[index])
                drawing.text(x + 42, y + 28, f"rank {rank}", size=14, bold=True)
                drawing.text(x + 42, y + 48, f"n={at['n']}, h={at['h']}", size=12)
        count = len(groups)
        drawing.text(left, 226, f"{count} set{'s' * (count > 1)} of statistics", size=13, anchor="start", color=MUTED)
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "process-grid": process_grid,
    "uneven-blocks": uneven_blocks,
    "halo-forward": halo_forward,
    "halo-backward": halo_backward,
    "redistribution": redistribution,
    "channels": channels,
    "batch-norm-scopes": batch_norm_scopes,
}

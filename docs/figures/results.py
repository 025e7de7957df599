"""Figures of measured results, from the tables of the evidence pages and from ``docs/evidence/losses.csv``."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from distconv.svg import COLORS, MUTED, Drawing

EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"
GRID = "#cbd2d9"


def rows_below(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table of a page whose first line starts with ``heading``, without its header."""
    text = (EVIDENCE / page).read_text()
    table = text[text.index(f"\n| {heading}") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def predicted_measured() -> Drawing:
    """Draw predicted against measured times of training steps."""
    rows = rows_below("performance-model.md", "ms measured (median) / predicted")
    pattern = r"([\d.]+) \([\d.]+\) / ([\d.]+)"
    series = [
        (
            row[0].split(",")[0],
            [tuple(map(float, found.groups())) for cell in row if (found := re.match(pattern, cell))],
        )
        for row in rows
    ]
    count = sum(len(pairs) for _, pairs in series)
    drawing = Drawing(
        640,
        470,
        f"Predicted against measured times of {count} training steps of five networks on one and two ranks, on "
        "logarithmic axes from 5 to 300 ms. All points are close to the diagonal.",
    )
    left, top, size = 90, 30, 360

    def place(value: float) -> float:
        return size * (math.log(value) - math.log(5)) / (math.log(300) - math.log(5))

    for tick in (5, 10, 20, 50, 100, 200):
        at = place(tick)
        drawing.line(left + at, top, left + at, top + size, color=GRID)
        drawing.line(left, top + size - at, left + size, top + size - at, color=GRID)
        drawing.text(left + at, top + size + 22, f"{tick}", size=14, color=MUTED)
        drawing.text(left - 10, top + size - at + 5, f"{tick}", size=14, anchor="end", color=MUTED)
    drawing.line(left, top + size, left + size, top, color=MUTED)
    for number, (name, pairs) in enumerate(series):
        for measured, predicted in pairs:
            x, y = left + place(measured), top + size - place(predicted)
            drawing.rectangle(x - 5, y - 5, 10, 10, fill=COLORS[number])
        drawing.rectangle(475, 60 + 32 * number, 14, 14, fill=COLORS[number])
        drawing.text(498, 72 + 32 * number, name, size=15, anchor="start")
    drawing.text(left + size / 2, top + size + 50, "measured, ms", size=15)
    drawing.text(left, 20, "predicted, ms", size=15)
    return drawing


def speed_ratios() -> Drawing:
    """Draw the ratios of step times to those of the fastest plain torch, with their ranges."""
    rows = rows_below("performance.md", "ratio, median over rounds (min to max)")
    pattern = r"([\d.]+) \(([\d.]+) to ([\d.]+)\)"
    drawing = Drawing(
        640,
        330,
        "Ratios of step times of four convolutions, with and without batch norm, to those of the fastest plain torch, "
        "medians and ranges over interleaved rounds, for images of 512 x 512 and 1024 x 1024. The table has the "
        "numbers.",
    )
    left, width = 260, 360

    def place(value: float) -> float:
        return left + width * value / 2

    for tick in (0, 0.5, 1, 1.5, 2):
        drawing.line(place(tick), 40, place(tick), 280, color=MUTED if tick == 1 else GRID)
        drawing.text(place(tick), 302, f"{tick:g}", size=14, color=MUTED)
    drawing.text(place(1), 322, "time relative to the fastest plain torch", size=14)
    for number, (name, *cells) in enumerate(rows):
        y = 70 + 55 * number
        drawing.text(left - 12, y + 9, name, size=13, anchor="end")
        for column, cell in enumerate(cells):
            median, low, high = (float(each) for each in re.match(pattern, cell).groups())
            at = y - 6 + 22 * column
            drawing.line(place(low), at, place(high), at, color=COLORS[column])
            drawing.rectangle(place(median) - 5, at - 5, 10, 10, fill=COLORS[column])
    for column, name in enumerate(("512 x 512", "1024 x 1024")):
        drawing.rectangle(left + 170 * column, 10, 14, 14, fill=COLORS[column])
        drawing.text(left + 22 + 170 * column, 22, name, size=14, anchor="start")
    return drawing


def memory_by_ranks() -> Drawing:
    """Draw the memory of a process on one rank and on four, and its part for libraries."""
    one, four = rows_below("performance-memory.md", "MiB | process | libraries | model")[:2]
    drawing = Drawing(
        640,
        210,
        f"Peak memory of a training step of mesh1k at 1024 x 1024: {one[1]} MiB on one rank, {four[1]} MiB on the rank "
        f"with the peak memory of h=4. Libraries take {one[2]} MiB of both.",
    )
    for number, (name, row) in enumerate((("one rank", one), ("h=4, peak rank", four))):
        process, libraries, model = (float(cell) for cell in row[1:4])
        y, scale = 40 + 70 * number, 400 / 3500
        drawing.text(150, y + 25, name, size=15, anchor="end")
        drawing.rectangle(160, y, libraries * scale, 38, fill="#e4e7eb")
        drawing.rectangle(160 + libraries * scale, y, model * scale, 38, fill=COLORS[number])
        drawing.text(172 + process * scale, y + 25, f"{process:,.0f} MiB", size=15, anchor="start")
    drawing.text(
        160, 190, "gray: libraries; color: model, activations, gradients", size=13, anchor="start", color=MUTED
    )
    return drawing


def loss_curves() -> Drawing:
    """Draw the losses of one process and of four ranks, and their relative difference."""
    with (EVIDENCE / "losses.csv").open(newline="") as file:
        rows = [tuple(float(value) for value in row.values()) for row in csv.DictReader(file)]
    largest = max(abs(four - one) / one for _, one, four in rows)
    drawing = Drawing(
        640,
        330,
        f"Losses of {len(rows)} steps of LeNet-5 on generated digits: one process, and four ranks with n=2,h=2, in "
        f"float32. The curves coincide; the largest relative difference is {largest:.1g}.",
    )
    left, top, width, height = 80, 30, 540, 230
    most = max(one for _, one, _ in rows)

    def place(step: float, loss: float) -> tuple[float, float]:
        return left + width * step / len(rows), top + height * (1 - loss / most)

    for tick in range(int(most) + 1):
        _, y = place(0, tick)
        drawing.line(left, y, left + width, y, color=GRID)
        drawing.text(left - 10, y + 5, f"{tick}", size=14, anchor="end", color=MUTED)
    for tick in range(0, len(rows) + 1, 40):
        drawing.text(place(tick, 0)[0], top + height + 22, f"{tick}", size=14, color=MUTED)
    curve(drawing, [place(step, one) for step, one, _ in rows], COLORS[0])
    for step, _, four in rows[::8]:
        x, y = place(step, four)
        drawing.rectangle(x - 4, y - 4, 8, 8, fill=COLORS[1])
    drawing.text(left, 20, "loss", size=15)
    drawing.text(left + width / 2, top + height + 46, "step", size=15)
    drawing.line(380, 60, 404, 60, color=COLORS[0])
    drawing.text(412, 65, "one process", size=15, anchor="start")
    drawing.rectangle(388, 82, 8, 8, fill=COLORS[1])
    drawing.text(412, 91, "four ranks, n=2,h=2", size=15, anchor="start")
    return drawing


def curve(drawing: Drawing, points: Sequence[tuple[float, float]], color: str) -> None:
    """Draw a line through points."""
    for (x, y), (next_x, next_y) in itertools.pairwise(points):
        drawing.line(x, y, next_x, next_y, color=color)


FIGURES: dict[str, Callable[[], Drawing]] = {
    "predicted-measured": predicted_measured,
    "speed-ratios": speed_ratios,
    "memory-by-ranks": memory_by_ranks,
    "loss-curves": loss_curves,
}

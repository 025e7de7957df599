"""Measure the timeline of the figure ``overlap``: ``mpiexec -n 2 python -m mpi4py docs/figures/measure_overlap.py``.

Writes ``overlap.json`` with the events of the second convolution of a step on rank 0, in microseconds.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distconv as dc

HERE = Path(__file__).resolve().parent
SIZE, CHANNELS = 512, 16
NAMES = {
    "distconv::pack": "start messages",
    "distconv::post": "start messages",
    "distconv::wait": "wait",
    "distconv::unpack": "unpack",
    "aten::convolution": "convolution",
    "aten::convolution_backward": "gradients",
}


def main() -> None:
    """Trace two steps and store the second convolution of the last one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    grid = dc.ProcessGrid(h=2)
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3)]
    model = dc.parallelize(nn.Sequential(*layers), grid)
    x = dc.scatter(torch.randn(1, CHANNELS, SIZE, SIZE), grid)
    for _ in range(3):
        model(x).square().mean().backward()
    with tempfile.TemporaryDirectory() as folder:
        folder = grid.world.bcast(folder)
        with dc.trace(folder) as traced, traced.step(0):
            model(x).square().mean().backward()
        if grid.rank == 0:
            trace = json.loads((Path(folder) / "rank-0.json").read_text())
            events = sorted((e for e in trace["traceEvents"] if e.get("ph") == "X"), key=lambda e: e["ts"])
            what = f"3x3, {CHANNELS} channels, {SIZE} x {SIZE} pixels, h=2"
            found = {"what": what, **{key: within(events, key) for key in ("forward", "backward")}}
            (HERE / "overlap.json").write_text(json.dumps(found, indent=1) + "\n")
        grid.world.Barrier()


def within(events: list[dict[str, Any]], direction: str) -> list[tuple[str, int, int]]:
    """Return name, start and length of the events inside the second convolution, from its first message on."""
    name = "distconv::conv2d" if direction == "forward" else "_ConvolveBackward"
    outer = [e for e in events if e["name"] == name][1]
    end = outer["ts"] + outer["dur"]
    inside = [e for e in events if outer["ts"] <= e["ts"] < end and e["name"] in NAMES]
    first = next(i for i, e in enumerate(inside) if e["name"] == "distconv::pack")
    begin = inside[first]["ts"]
    return [(NAMES[e["name"]], round(e["ts"] - begin), round(e["dur"])) for e in inside[first:]]


if __name__ == "__main__":
    main()

"""Figures of what happens when: gradients, overlap, dispatch, captured steps, schedules, planning and the packages."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from distconv.perfmodel import Machine, evaluate, select, trace
from distconv.pipeline import schedule, simulate
from distconv.plan import format_parts
from distconv.svg import COLORS, INK, MUTED, Drawing, color_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSES = {"F": COLORS[0], "B": COLORS[1], "I": COLORS[1], "W": COLORS[2]}
"""Colors of the passes of a pipeline: forward, backward, backward of the input, backward of the weights."""


def gradients() -> Drawing:
    """Draw the gradient of a replicated weight: local contributions of the ranks, and their sum."""
    x = torch.arange(1.0, 7.0)
    blocks = x.split(3)
    weight = torch.tensor(2.0, requires_grad=True)
    parts = [torch.autograd.grad((weight * block).square().sum() / 2, weight)[0].item() for block in blocks]
    (total,) = torch.autograd.grad((weight * x).square().sum() / 2, weight)
    drawing = Drawing(
        640,
        300,
        "The weight w=2 is replicated on two ranks, and x is split. Forward, each rank uses w as it is. Backward, "
        f"rank 0 has the contribution {parts[0]:g} and rank 1 has {parts[1]:g}; an all-reduce gives both ranks the "
        f"full gradient {total.item():g}, the single-process result.",
    )
    drawing.text(20, 32, "loss = sum((w x)^2) / 2, with x split over h=2", size=16, anchor="start", bold=True)
    for rank, (block, part) in enumerate(zip(blocks, parts, strict=True)):
        top = 60 + 100 * rank
        drawing.rectangle(20, top, 600, 84, fill="#ffffff", stroke="#cbd2d9")
        drawing.text(34, top + 47, f"rank {rank}", size=15, anchor="start", bold=True)
        numbers = [f"{value:g}" for value in block.tolist()]
        for column, number in enumerate(numbers):
            drawing.rectangle(100 + 30 * column, top + 28, 28, 28, fill=color_of(rank))
            drawing.text(114 + 30 * column, top + 47, number, size=14)
        drawing.text(145, top + 20, "block of x", size=12, color=MUTED)
        drawing.text(250, top + 20, "w, replicated", size=12, color=MUTED)
        drawing.rectangle(232, top + 28, 36, 28, fill="#e4e7eb")
        drawing.text(250, top + 47, "2", size=14)
        drawing.text(375, top + 20, "local contribution", size=12, color=MUTED)
        drawing.rectangle(345, top + 28, 60, 28, fill=color_of(rank), dashed=True)
        drawing.text(375, top + 47, f"{part:g}", size=14)
        drawing.line(272, top + 42, 340, top + 42, arrow=True)
        drawing.text(560, top + 20, "w.grad", size=12, color=MUTED)
        drawing.rectangle(530, top + 28, 60, 28, fill="#e4e7eb")
        drawing.text(560, top + 47, f"{total.item():g}", size=14, bold=True)
        drawing.line(409, top + 42, 525, top + 42, arrow=True)
    drawing.text(466, 154, "all-reduce (sum)", size=14, bold=True)
    drawing.text(20, 284, "forward: identity; backward: all-reduce", size=14, anchor="start", color=MUTED)
    return drawing


def overlap() -> Drawing:
    """Draw a measured trace of a convolution: its halo exchange is overlapped with the interior of the block."""
    measured = json.loads((HERE / "overlap.json").read_text())
    drawing = Drawing(
        640,
        300,
        "Measured timeline of one convolution on rank 0 of h=2. Forward: pack and start the halo messages, convolve "
        "the interior, wait for the halo, convolve the border. Backward: start the halo of the gradient, compute the "
        "gradient of the interior and of the weights, wait, compute the border.",
    )
    drawing.text(20, 30, f"A convolution on rank 0: {measured['what']}", size=14, anchor="start", bold=True)
    for top, key in ((70, "forward"), (180, "backward")):
        events = measured[key]
        end = max(start + length for _, start, length in events)
        drawing.text(20, top + 6, f"{key}, {end / 1000:.1f} ms", size=14, anchor="start", bold=True)
        for name, start, length in events:
            communicates = name in ("start messages", "wait", "unpack")
            x, width = 20 + 600 * start / end, max(2.0, 600 * length / end)
            drawing.rectangle(
                x, top + (50 if communicates else 18), width, 28, fill=COLORS[1] if communicates else COLORS[0]
            )
            if width > 60:
                drawing.text(x + width / 2, top + (69 if communicates else 37), name, size=12)
    drawing.text(
        20,
        288,
        "upper row: computation; lower row: start of messages, wait for them",
        size=13,
        anchor="start",
        color=MUTED,
    )
    return drawing


def dispatch() -> Drawing:
    """Draw how a call with a DistTensor finds its operator."""
    steps = [
        ("F.conv2d(x, weight)", "your model calls torch with a DistTensor"),
        ("__torch_function__", "torch hands the call to distconv"),
        ("a distributed rule?", "the operator registry, by torch function"),
    ]
    drawing = Drawing(
        640,
        380,
        "A torch call with a DistTensor reaches __torch_function__. If the function has a distributed rule, the rule "
        "runs on the blocks and communicates. If it is safe, the replicated fallback gathers the operands, runs "
        "torch on every rank and warns once. Otherwise an UnsupportedOperation is raised on all ranks.",
    )
    for number, (name, words) in enumerate(steps):
        y = 20 + 72 * number
        drawing.rectangle(195, y, 250, 48, fill="#ffffff")
        drawing.text(320, y + 21, name, size=15, bold=True)
        drawing.text(320, y + 39, words, size=11, color=MUTED)
        if number:
            drawing.line(320, y - 22, 320, y - 3, arrow=True)
    ends = [
        (20, "rule", "blocks, halo exchange,", "partial sums", COLORS[2]),
        (228, "replicated fallback", "gather, run torch,", "one ReplicationWarning", COLORS[5]),
        (436, "UnsupportedOperation", "on all ranks,", "with a suggested fix", COLORS[1]),
    ]
    for x, title, first, second, color in ends:
        drawing.rectangle(x, 262, 184, 90, fill=color)
        drawing.text(x + 92, 290, title, size=15, bold=True)
        drawing.text(x + 92, 314, first, size=13)
        drawing.text(x + 92, 334, second, size=13)
        drawing.line(320, 214, x + 92, 259, arrow=True)
    drawing.text(172, 240, "yes", size=13, anchor="end")
    drawing.text(330, 246, "no, but safe", size=13, anchor="start")
    drawing.text(470, 240, "no", size=13, anchor="start")
    return drawing


def captured_step() -> Drawing:
    """Draw a captured step: guards, recording and replay."""
    drawing = Drawing(
        640,
        280,
        "A call of a captured step first compares its guards on all ranks: shapes, modes, modules, hooks and "
        "settings. If there is a recording with equal guards, its generated code replays the operations and "
        "messages. Otherwise the step runs as Python once and is recorded.",
    )

    def box(x: float, y: float, width: float, title: str, *words: str, fill: str) -> None:
        drawing.rectangle(x, y, width, 26 + 19 * len(words), fill=fill)
        drawing.text(x + width / 2, y + 20, title, size=15, bold=True)
        for line, each in enumerate(words):
            drawing.text(x + width / 2, y + 40 + 19 * line, each, size=12)

    box(20, 90, 130, "step(x, t)", "call on all ranks", fill="#ffffff")
    box(190, 80, 180, "compare guards", "shapes, modes, modules,", "hooks, settings", fill=COLORS[5])
    box(430, 24, 190, "replay", "generated code:", "operations and messages", "in recorded order", fill=COLORS[2])
    box(
        430,
        158,
        190,
        "run and record",
        "Python runs once;",
        "operators, messages and",
        "state are recorded",
        fill=COLORS[1],
    )
    drawing.line(153, 112, 186, 112, arrow=True)
    drawing.line(373, 100, 426, 70, arrow=True)
    drawing.line(373, 124, 426, 186, arrow=True)
    drawing.line(525, 154, 525, 112, arrow=True, dashed=True)
    drawing.text(400, 74, "equal", size=13, anchor="end")
    drawing.text(394, 176, "different", size=13, anchor="end")
    drawing.text(535, 138, "next call", size=12, anchor="start", color=MUTED)
    drawing.text(
        20,
        268,
        "print(), files, random numbers of Python: they run in the recorded call only",
        size=13,
        anchor="start",
        color=MUTED,
    )
    return drawing


def schedules() -> Drawing:
    """Draw simulated schedules of a pipeline with 3 stages and 6 micro-batches."""
    names = (("gpipe", "GPipe"), ("1f1b-sno", "1F1B"), ("zero-bubble", "zero bubble"))
    found = [(title, simulate(schedule(name, 3, 6), 1.0, 2.0)) for name, title in names]
    longest = max(timeline.makespan for _, timeline in found)
    bubbles = ", ".join(f"{title} {timeline.bubble:.0%}" for title, timeline in found)
    drawing = Drawing(
        640,
        420,
        "Simulated schedules of 3 stages and 6 micro-batches, backward twice as long as forward. Idle time: "
        f"{bubbles}. Micro-batches in memory at the first stage: "
        f"{', '.join(f'{title} {timeline.peak_activations[0]:g}' for title, timeline in found)}.",
    )
    for number, (title, timeline) in enumerate(found):
        top = 16 + 132 * number
        drawing.text(
            20,
            top + 14,
            f"{title}: idle {timeline.bubble:.0%}, {timeline.peak_activations[0]:g} micro-batches in memory",
            size=14,
            anchor="start",
            bold=True,
        )
        for stage in range(3):
            drawing.text(74, top + 44 + 32 * stage, f"stage {stage}", size=13, anchor="end")
        for span in timeline.spans:
            x = 84 + 536 * span.start / longest
            width = 536 * (span.end - span.start) / longest
            if width:
                y = top + 26 + 32 * span.action.stage
                drawing.rectangle(x, y, width, 26, fill=PASSES.get(span.action.kind.value, "#e4e7eb"))
                drawing.text(x + width / 2, y + 18, str(span.action.microbatch), size=12)
    drawing.text(
        20,
        412,
        "blue: forward; orange: backward (of the input); green: of the weights",
        size=13,
        anchor="start",
        color=MUTED,
    )
    return drawing


def planning() -> Drawing:
    """Draw a plan that the planner finds: the time of each layer on four grids, and the shortest path."""
    convolutions = OrderedDict(
        conv1=nn.Conv2d(18, 32, 3, padding=1),
        pool1=nn.AvgPool2d(4),
        conv2=nn.Conv2d(32, 128, 3, padding=1),
        pool2=nn.AvgPool2d(4),
        conv3=nn.Conv2d(128, 512, 3, padding=1),
        pool3=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(512, 1000),
    )
    graph, machine = trace(nn.Sequential(convolutions), (2, 18, 512, 512)), Machine.load("lassen")
    best = select(graph, machine, 4)
    grids = [{"n": 4}, {"h": 4}, {"n": 2, "w": 2}, {"c": 4}]
    columns = list(best.plan.layers.items())
    chosen = [grids.index(grid) for _, grid in columns]
    predictions = [evaluate(graph, {"*": grid}, machine, 4) for grid in grids]
    fastest = min(prediction.time for prediction in predictions)
    path = ", ".join(f"{name} on {format_parts(grid)}" for name, grid in columns)
    drawing = Drawing(
        640,
        350,
        "A plan for four layers on four ranks. Each box has the predicted time in ms of a layer on a grid. The "
        f"shortest path is {path}: {1e3 * best.time:.1f} ms. The fastest single grid takes {1e3 * fastest:.1f} ms.",
    )
    for column, (layer, _) in enumerate(columns):
        x = 120 + 140 * column
        drawing.text(x + 40, 30, layer, size=15, bold=True)
        for row, prediction in enumerate(predictions):
            y = 46 + 62 * row
            for before in range(len(grids) if column else 0):
                on_path = (chosen[column - 1], chosen[column]) == (before, row)
                color = INK if on_path else "#d3d8de"
                drawing.line(x - 60, 63 + 62 * before, x - 2, y + 17, color=color, arrow=on_path)
            drawing.rectangle(x, y, 80, 34, fill=COLORS[2] if chosen[column] == row else "#ffffff")
            drawing.text(x + 40, y + 22, f"{1e3 * prediction.layers[layer].spent:.2f}", size=14)
    for row, grid in enumerate(grids):
        drawing.text(104, 68 + 62 * row, format_parts(grid), size=15, anchor="end")
    drawing.text(
        20,
        312,
        "boxes: ms of a layer on a grid, predicted; edges: redistribution",
        size=14,
        anchor="start",
        color=MUTED,
    )
    total = f"this path: {1e3 * best.time:.1f} ms; the fastest single grid: {1e3 * fastest:.1f} ms"
    drawing.text(20, 336, total, size=14, anchor="start", color=MUTED)
    return drawing


def packages() -> Drawing:
    """Draw which packages import which, read from the import statements."""
    names = ("distconv", "kernels", "layers", "perfmodel", "pipeline", "jobs")
    imports: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        for path in sorted((ROOT / name).rglob("*.py")):
            if name == "distconv" and path.relative_to(ROOT).parts[1] in names:
                continue
            for target in re.findall(r"^(?:from|import) distconv\.(\w+)", path.read_text(), re.MULTILINE):
                imports[name].add(target if target in names else "distconv")
    words = {
        "distconv": ("grids, DistTensor, messages,", "capture, checkpoints, data"),
        "kernels": ("local kernels: convolution,", "packing, sparse, scans"),
        "layers": ("distributed operators,", "models, sparse layers"),
        "perfmodel": ("cost model, planners,", "profiles"),
        "pipeline": ("schedules, simulation,", "stages, runtime"),
        "jobs": ("commands: train, predict, plan,", "bench, verify, reproduce"),
    }
    places = {
        "jobs": (225, 20),
        "perfmodel": (20, 130),
        "pipeline": (225, 130),
        "layers": (430, 130),
        "distconv": (225, 240),
        "kernels": (430, 240),
    }
    drawing = Drawing(
        640,
        330,
        "The packages of distconv. "
        + " ".join(
            f"{name} imports {', '.join(sorted(imports[name] - {name})) or 'no other package'}." for name in names
        ),
    )
    for name in names:
        x, y = places[name]
        for target in sorted(imports[name] - {name}):
            tx, ty = places[target]
            if ty - y == 110:  # the row below
                drawing.line(x + 95, y + 66, tx + 95, ty - 2, color="#9aa5b1", arrow=True)
            elif ty == y:
                drawing.line(x + 190 * (tx > x), y + 32, tx + 190 * (tx < x), ty + 32, color="#9aa5b1", arrow=True)
    for name in names:
        x, y = places[name]
        drawing.rectangle(x, y, 190, 64, fill="#ffffff")
        middle = x + 95
        drawing.text(middle, y + 22, name, size=15, bold=True)
        for line, each in enumerate(words[name]):
            drawing.text(middle, y + 40 + 16 * line, each, size=11, color=MUTED)
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "gradients": gradients,
    "overlap": overlap,
    "dispatch": dispatch,
    "captured-step": captured_step,
    "schedules": schedules,
    "planning": planning,
    "packages": packages,
}

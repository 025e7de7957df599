"""Where the time of a step of small layers goes, eagerly and captured: ``python -m`` this, with a grid.

    mpiexec -n 2 python -m mpi4py -m tests.distconv.capture.where_time_goes h=2

The step is that of :mod:`tests.distconv.capture.small_layers`. A replay is run with a clock behind each of its calls.
Of eager steps the waits are timed, of which torch's calls are those of the replay; what is left is Python's: autograd's
graph, distributed tensors, plans that are looked up, messages that are made.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import distconv as dc
from distconv.capture.entries import Operator
from distconv.capture.messages import Persistent, Posting, Summing, wait
from distconv.capture.placement import below_autograd
from distconv.capture.program import Program
from distconv.process import watchdog
from tests.distconv.capture.small_layers import network

STEPS, WARM = 200, 10

_KERNELS = ("convolution", "batch_norm", "relu", "threshold")
_VIEWS = ("as_strided", "view", "slice", "select", "split", "unbind", "unsqueeze", "expand", "permute")


def kind(program: Program, line: str) -> str:
    """What a line of a replay's source does, or nothing."""
    called = re.match(r"\s*(?:.* = )?(\w+)\(", line)
    function: Any = program._constants.get(called[1]) if called else None
    if function is None:
        return ""
    if function is wait:
        number = re.search(r"\(q(\d+)", line)
        return f"waits: {program._constants[f'd{number[1]}']().split(' with ')[0]}" if number else ""
    if isinstance(function, (Persistent, Posting, Summing)):
        return "messages posted"
    names = {id(entry.function._op): str(entry.function) for entry in program._entries if isinstance(entry, Operator)}
    name = names.get(id(function), getattr(function, "__name__", type(function).__name__)).removeprefix("aten.")
    if any(each in name for each in _KERNELS):
        return "convolution, batch norm, ReLU"
    if name.split(".")[0] in _VIEWS:
        return "views"
    return "weights compared" if name in ("_Riders", "_compare") else "small operators"


def clocked(program: Program) -> tuple[Callable[..., Any], list[str]]:
    """The replay of ``program`` with two more arguments, times that are added to and a clock; kinds of these times."""
    head, *lines, last = program.source.splitlines()
    source, kinds = [head.replace("(A, G,", "(A, G, spent, now,"), "    before = now()"], []
    for line in lines:
        source.append(line)
        found = kind(program, line)
        if found:
            indent = line[: len(line) - len(line.lstrip())]
            source.append(f"{indent}after = now(); spent[{len(kinds)}] += after - before; before = after")
            kinds.append(found)
    scope = dict(program._constants)
    exec(compile("\n".join([*source, last]), "<clocked replay>", "exec"), scope)
    return scope["replay"], kinds


def timed(function: Callable[[], object], world: Any, began: Callable[[], object] = lambda: None) -> float:
    """Microseconds of a call, the median; ``began`` is called once it is warm."""
    times = []
    for step in range(STEPS + WARM):
        if step == WARM:
            began()
        world.Barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:]) * 1e6


def main(grid: dc.ProcessGrid) -> None:
    """Measure and print, on rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = dc.parallelize(network(), grid)
    x = dc.scatter(torch.randn(2, 4, 8, 8), grid)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    captured: Any = dc.capture(step)
    captured()
    program = next(iter(captured._replays.values()))._program
    replay, kinds = clocked(program)
    spent, waits = [0.0] * len(kinds), []

    def replayed() -> None:
        with torch.no_grad(), below_autograd():
            replay([], [None] * program._gradients, spent, time.perf_counter)

    @contextmanager
    def waiting(_: object) -> Iterator[None]:
        start = time.perf_counter()
        yield
        waits.append(time.perf_counter() - start)

    timed(replayed, grid.world, lambda: spent.__setitem__(slice(None), [0.0] * len(kinds)))
    whole = timed(captured, grid.world)
    with patch.object(watchdog, "waiting", waiting):
        eager = timed(step, grid.world, waits.clear)
    if grid.rank == 0:
        report(grid, [each / STEPS * 1e6 for each in spent], kinds, (eager, whole, sum(waits) / STEPS * 1e6))


def report(grid: dc.ProcessGrid, spent: list[float], kinds: list[str], times: tuple[float, float, float]) -> None:
    """Print the table."""
    eager, whole, waits = times
    print(f"{grid.describe()}: us of a step, on rank 0: eager {eager:.0f}, captured {whole:.0f}")
    print(f"{'captured':<40}{'calls':>6}{'us':>9}{'a call':>9}")
    for each in sorted(set(kinds), key=lambda name: -sum(t for t, k in zip(spent, kinds, strict=True) if k == name)):
        found = [t for t, k in zip(spent, kinds, strict=True) if k == each]
        print(f"{each:<40}{len(found):>6}{sum(found):>9.0f}{sum(found) / len(found):>9.1f}")
    torchs = sum(t for t, k in zip(spent, kinds, strict=True) if not k.startswith("waits"))
    print(f"{'eager':<40}\n{'waits':<40}{'':>6}{waits:>9.0f}")
    print(f"{'the calls that a replay makes':<40}{'':>6}{torchs:>9.0f}")
    print(f"{'Python':<40}{'':>6}{eager - waits - torchs:>9.0f}")


if __name__ == "__main__":
    main(dc.ProcessGrid(**dc.parse_grid(sys.argv[1])))

"""Compare steps over rows with ShardTensor of NVIDIA PhysicsNeMo, interleaved in the same run.

    python -m venv peer && peer/bin/pip install torch==2.13.0 nvidia-physicsnemo==2.2.2
    PEER="python -m mpi4py -m tests.jobs.bench.peers.shard_tensor peer/bin/python"
    OMP_NUM_THREADS=1 mpiexec -n 2 $PEER 9 network 32 512

The arguments are the interpreter of the peer's environment, the number of rounds, a case of
:mod:`.shard_tensor_step`, and sizes of the sample. distconv runs on the ranks of the job, in both memory formats, eager
and captured; ShardTensor runs in as many processes over gloo, eager and compiled; plain torch in one process with a
thread for each rank. All of them have glibc set to keep freed memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import distconv as dc
from distconv.jobs.timing import CPU, idle, time_action, time_interleaved
from distconv.process.launchers import environment_without_launcher
from distconv.process.memory import allocator
from tests.jobs.bench.peers import shard_tensor_step

LOSSES = 1e-4
"""Largest relative difference of the losses of two variants, in float32."""


class Child:
    """Processes of the step program. Call it with a number of steps; it returns the seconds of the last one."""

    def __init__(self, python: str, words: Sequence[str], ranks: int) -> None:
        env = environment_without_launcher() | allocator.environment("heap")
        env |= {"OMP_NUM_THREADS": str(1 if ranks else 2)}
        self._folder = tempfile.TemporaryDirectory(prefix="distconv-")
        places = [[str(ranks), str(rank), f"{self._folder.name}/meeting"] for rank in range(ranks)] or [[]]
        # The others wait for rank 0, which alone reads requests and answers.
        self._processes = [
            subprocess.Popen(
                [python, shard_tensor_step.__file__, *words, *place],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True,
            )
            for place in places
        ]  # fmt: skip
        self.loss = float("nan")

    def __call__(self, count: int = 1) -> float:
        first = self._processes[0]
        assert first.stdin and first.stdout
        first.stdin.write(f"{count}\n")
        first.stdin.flush()
        # Libraries may print, too.
        answer = next((line for line in first.stdout if line.startswith("[")), None)
        if answer is None:
            raise RuntimeError("the process ended")
        seconds, self.loss = json.loads(answer)
        return float(seconds)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate("0\n" if process is self._processes[0] else "")
        self._folder.cleanup()


def _distributed(grid: dc.ProcessGrid, case: str, size: int, *, channels_last: bool, captured: bool) -> Any:
    module, x = shard_tensor_step.build(case, size, channels_last=channels_last)
    step = shard_tensor_step.step_of(dc.parallelize(module, grid), dc.scatter(x, grid))
    loss = step().item()
    act = dc.capture(step) if captured else step
    act()
    return partial(time_action, grid.world, CPU, act), loss


def measure(python: str, rounds: int, case: str, size: int) -> None:
    """Measure and print a case. Collective over MPI.COMM_WORLD."""
    world, grid = MPI.COMM_WORLD, dc.ProcessGrid(h=MPI.COMM_WORLD.size)
    variants: dict[str, Callable[[], float]] = {}
    losses, children = {}, {}
    for channels_last in (False, True):
        order = "channels_last" if channels_last else "contiguous"
        for captured in (False, True):
            name = f"distconv, {order}, {'captured' if captured else 'eager'}"
            variants[name], losses[name] = _distributed(
                grid, case, size, channels_last=channels_last, captured=captured
            )
    others = {f"ShardTensor, {mode}": (python, "shards", mode, world.size) for mode in ("eager", "compiled")}
    for order in ("contiguous", "channels_last"):
        others |= {f"torch, {order}, {mode}": (sys.executable, order, mode, 0) for mode in ("eager", "compiled")}
    for name, (interpreter, kind, mode, ranks) in others.items():
        variants[name] = idle
        if world.rank == 0:
            child = Child(interpreter, (case, str(size), kind, mode), ranks)
            try:
                child()
            except RuntimeError as error:
                print(f"{case}, {size}: {name}: {error}")
                continue
            losses[name] = child.loss
            variants[name] = children[name] = child
    times = time_interleaved(world, variants, rounds, warm_up=2, asleep=True)
    for child in children.values():
        child.close()
    if world.rank == 0:
        _print(f"{case}, {size} x {size}", {name: times[name] for name in losses}, losses)


def _print(what: str, times: dict[str, list[float]], losses: dict[str, float]) -> None:
    expected = losses[next(iter(losses))]
    wrong = {name: loss for name, loss in losses.items() if abs(loss - expected) > LOSSES * abs(expected)}
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{what}: ms, median (min to max){f'; other losses than {expected}: {wrong}' if wrong else ''}")
    for name, values in times.items():
        print(f"  {name:<36}{1e3 * median[name]:9.2f} ({1e3 * min(values):.2f} to {1e3 * max(values):.2f})")
    peers = [name for name in times if name.startswith("ShardTensor")]
    fastest = min(peers, key=median.__getitem__, default=None)
    for mode in ("eager", "captured"):
        best = min((name for name in times if name.endswith(mode) and name[:8] == "distconv"), key=median.__getitem__)
        if fastest:
            ratios = [a / b for a, b in zip(times[best], times[fastest], strict=True)]
            print(f"  {best} / {fastest}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    sys.stdout.flush()


def main() -> None:
    """Measure all sizes of a case."""
    python, rounds, case, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    for size in map(int, sizes):
        measure(os.path.abspath(python), int(rounds), case, size)


if __name__ == "__main__":
    main()

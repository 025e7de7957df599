"""BaPipe's Table VI: ResNet-50 on FPGA boards, data parallelism against a pipeline in the event simulation.

A layer takes as long as its arithmetic or its DDR traffic, whichever is longer, for one sample at a time in fp16. The
features that the backward pass needs are written to DDR and read back. Weights and gradients of a pipeline's stage stay
on chip as far as they fit. The remaining ones, and all of them in data parallelism, are in DDR. Each pass reads the
weights, and the backward pass also reads and writes their gradients.

The paper does not state how often data parallelism does that. The table has three columns:

- "streamed": once per sample, as in a board that streams samples;
- "by layer": once per mini-batch, layer by layer;
- "equal": as "by layer", but all boards compute the same number of samples. In the other columns, the number of samples
  is proportional to the board's speed.

Source: Zhao et al. 2020 (BaPipe), 3.2.1, 4.3, Tables V and VI; Wang et al. 2020 (FPDeep).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from distconv.jobs.papers.printed_tables import Rows
from distconv.layers.models import MODELS
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.operation_work import PHASES, local_call, work
from distconv.perfmodel.exploration.candidate_stages import PARALLEL
from distconv.perfmodel.exploration.choices import Exploration
from distconv.perfmodel.exploration.explore import ASYNCHRONOUS, explore
from distconv.perfmodel.graph.graph import Operation
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.devices import Device
from distconv.pipeline import schedule, simulate

from .networks import IMAGE

BATCH = 128
"""Samples of a mini-batch (4.3)."""

FP16_BYTES = 2
ROUNDS = 8
"""Iterations of :func:`piped`."""

TABLE_VI = (
    (("vcu118",) * 4, 1.0),
    (("vcu129", "vcu129", "vcu118", "vcu118"), 1.05),
    (("vcu129",) * 4, 1.14),
)
"""Boards in the order of the chain, and the paper's speedup over data parallelism."""

PIPELINES = tuple(name for name in ASYNCHRONOUS if name != PARALLEL)
"""Schedules of a pipeline of boards, which send results while they compute them (3.2.1)."""


@dataclass(frozen=True)
class FpgaConvolution:
    """Work of a convolution for one sample. The layers after it up to the next convolution add nothing.

    ``inputs``, ``outputs`` and ``weights`` are numbers of elements.
    """

    name: str
    forward_flops: float
    backward_flops: float
    inputs: int
    outputs: int
    weights: int

    def seconds(self, board: Machine, fetched: float) -> tuple[float, float]:
        """Return the seconds of forward and backward.

        Parameters
        ----------
        board : Machine
            Board that computes the layer.
        fetched : float
            Fraction of the weights that is read from DDR for each sample.

        Returns
        -------
        (float, float)
        """
        roofline, moved = board.compute[0].roofline, fetched * self.weights
        forward = roofline.time(self.forward_flops, FP16_BYTES * (self.outputs + moved), self.outputs)
        # Backward reads the weights, and reads and writes their gradients.
        return forward, roofline.time(self.backward_flops, FP16_BYTES * (self.inputs + 3 * moved), self.outputs)

    def layer(self, board: Machine, fetched: float) -> Layer:
        """Return the layer's entry in a profile of one sample.

        Parameters
        ----------
        board, fetched
            As in :meth:`seconds`.

        Returns
        -------
        Layer
        """
        return Layer(self.name, *self.seconds(board, fetched), FP16_BYTES * self.outputs, FP16_BYTES * self.weights)


def table_vi() -> Rows:
    """Print the time of a mini-batch on each cluster of boards, and our and the paper's speedup. Return the rows."""
    print(f"\nTable VI: ResNet-50, {BATCH} samples in fp16, micro-batches of 1; seconds, speedup over data parallelism")
    print(f"{'':<20}{'data parallelism':<30}{'pipeline':<20}{'speedup over':<21}{'paper':>6}  stages' weights")
    print(f"{'boards':<20}{'streamed':>9}{'by layer':>10}{'equal':>9}  ", end="")
    print("".join(f"{name:<10}" for name in PIPELINES), f"{'streamed by layer':<27} on chip", sep="")
    network = convolutions()
    return [_row(network, [Machine.load(name) for name in names], paper) for names, paper in TABLE_VI]


def _row(network: Sequence[FpgaConvolution], boards: Sequence[Machine], paper: float) -> dict[str, object]:
    # A board computes BATCH / boards samples. Weights that it reads once per mini-batch are, per sample, that fraction.
    parallel = {
        "streamed": parallel_time(network, boards, 1.0),
        "by layer": parallel_time(network, boards, len(boards) / BATCH),
        "equal": parallel_time(network, boards, len(boards) / BATCH, equal=True),
    }
    exploration, kept, times = piped(network, boards)
    names = [board.name for board in boards]
    print(f"{' + '.join(f'{names.count(name)} {name}' for name in dict.fromkeys(names)):<20}", end="")
    print("".join(f"{time:>{width}.4f}" for time, width in zip(parallel.values(), (9, 10, 9), strict=True)), end="  ")
    best = min(times.values())
    speedups = {name: time / best for name, time in parallel.items()}
    print("".join(f"{time:<10.4f}" for time in times.values()), end="")
    print(f"{speedups['streamed']:<9.3f}{speedups['by layer']:<12.3f}{paper:>6.2f}  ", end="")
    print(", ".join(f"{fraction:.2f}" for fraction in kept))
    return {
        "boards": names,
        "dp_s": parallel,
        "pipeline_s": times,
        "closed_s": exploration.time,
        "speedup": speedups,
        "paper": paper,
        "kept": kept,
    }


def convolutions() -> list[FpgaConvolution]:
    """Return ResNet-50's convolutions for one sample, in order. The last one is its fully connected layer."""
    graph = trace(MODELS["resnet50"](), (1, *IMAGE))
    return [_convolution(op) for op in graph.operations if op.decides]


def _convolution(op: Operation) -> FpgaConvolution:
    # On one rank, so nothing is split. PHASES are forward, backward-data and backward-weights.
    call = local_call(op, AxisParts.from_axes({}, 1, 1))
    forward, *backward = (work(call, phase).flops for phase in PHASES)
    weights = sum(constant.elements for constant in op.parameters)
    return FpgaConvolution(op.name, forward, sum(backward), op.x.elements, op.y.elements, weights)


def parallel_time(
    network: Sequence[FpgaConvolution], boards: Sequence[Machine], fetched: float, *, equal: bool = False
) -> float:
    """Return the seconds of a mini-batch by data parallelism.

    Parameters
    ----------
    network : sequence of FpgaConvolution
    boards : sequence of Machine
    fetched : float
        As in :meth:`FpgaConvolution.seconds`.
    equal : bool
        True gives all boards the same number of samples. Otherwise the number is proportional to the board's speed.

    Returns
    -------
    float
    """
    times = [sum(sum(layer.seconds(board, fetched)) for layer in network) for board in boards]
    weights = FP16_BYTES * sum(layer.weights for layer in network)
    # The slowest board's link: every board waits for the sum.
    allreduce_s = max(board.allreduce(RankGroup(len(boards), 1), weights) for board in boards)
    # Seconds per sample of all boards together. With equal numbers of samples the slowest board determines them,
    # otherwise the sum of the speeds.
    sample_s = max(times) / len(boards) if equal else 1 / sum(1 / time for time in times)
    return BATCH * sample_s + allreduce_s


def piped(
    network: Sequence[FpgaConvolution], boards: Sequence[Machine]
) -> tuple[Exploration, list[float], dict[str, float]]:
    """Return BaPipe's exploration, the fraction of each stage's weights on chip, and seconds of each schedule.

    Parameters
    ----------
    network : sequence of FpgaConvolution
    boards : sequence of Machine

    Returns
    -------
    (Exploration, list of float, dict of str to float)
    """
    kept, best = [1.0] * len(boards), None
    # The stages determine which weights fit on chip, and these determine the layer times that the stages are chosen by.
    # The iteration may alternate between two results, so the best one is kept.
    for _ in range(ROUNDS):
        profile, devices = _profile_and_devices(network, boards, kept)
        exploration = explore(
            profile,
            boards[0],
            devices,
            BATCH,
            samples=1,
            microbatches=[BATCH],
            schedules=PIPELINES,
            share_layers=True,  # as FPDeep (3.3.2)
            optimizer_slots=0,  # memory for weights and gradients only, 2w in Table I
        )
        kept = _on_chip_fractions(network, boards, exploration.stages.positions)
        times = _simulated_times(network, boards, kept, exploration.stages.positions)
        if best is None or min(times.values()) < min(best[2].values()):
            best = exploration, kept, times
    assert best is not None
    return best


def _profile_and_devices(
    network: Sequence[FpgaConvolution], boards: Sequence[Machine], kept: Sequence[float]
) -> tuple[Profile, list[Device]]:
    # The profile gives the sizes of features and weights. Its times are not used, since each device has its own.
    profile = Profile([layer.layer(boards[0], 0.0) for layer in network])
    # A board has the fraction ``kept`` of its stage's weights on chip, taken as the same for all layers.
    devices = [
        Device(f"board {index}", 1, [sum(layer.seconds(board, 1 - fraction)) for layer in network], board.memory_bytes)
        for index, (board, fraction) in enumerate(zip(boards, kept, strict=True))
    ]
    return profile, devices


def _stage_sums(values: Sequence[float], positions: Sequence[float]) -> list[float]:
    """Return the sums of values between positions. A position between two integers splits a value in proportion."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.interp([0.0, *positions, float(len(values))], np.arange(len(sums)), sums)
    return [float(b - a) for a, b in pairwise(at)]


def _on_chip_fractions(
    network: Sequence[FpgaConvolution], boards: Sequence[Machine], positions: Sequence[float]
) -> list[float]:
    """Return the fraction of weights and gradients of each stage that fits on chip."""
    stage_bytes = _stage_sums([2.0 * FP16_BYTES * layer.weights for layer in network], positions)
    return [min(1.0, board.on_chip_bytes / nbytes) for board, nbytes in zip(boards, stage_bytes, strict=True)]


def _simulated_times(
    network: Sequence[FpgaConvolution], boards: Sequence[Machine], kept: Sequence[float], positions: Sequence[float]
) -> dict[str, float]:
    """Return the simulated seconds of a mini-batch by each schedule, with the stages between ``positions``."""
    passes = [
        [layer.seconds(board, 1 - fraction) for layer in network] for board, fraction in zip(boards, kept, strict=True)
    ]
    # Each stage has the layer times of its own board.
    forward, backward = (
        [_stage_sums([both[way] for both in seconds], positions)[stage] for stage, seconds in enumerate(passes)]
        for way in (0, 1)
    )
    return {name: simulate(schedule(name, len(boards), BATCH), forward, backward).makespan for name in PIPELINES}

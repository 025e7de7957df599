"""BaPipe's Table IV: the largest GNMT that data parallelism, PipeDream, GPipe and 1F1B-SNO train on a GPU.

Memory holds the layer outputs of all micro-batches in flight, weights, gradients and Adam's state. PipeDream stores
weights once per mini-batch in flight. PyTorch's own memory is not included, so the table is computed twice: for all of
the memory, and for as much as the paper's largest network on one GPU needs here.

Source: Zhao et al. 2020 (BaPipe), 4.2.2 ("32 per GPU", M = 2 N: micro-batches of 16).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from distconv.jobs.papers.printed_tables import Rows
from distconv.perfmodel.exploration.candidate_stages import PARALLEL, ExplorationContext
from distconv.perfmodel.exploration.cuts import least_memory_cuts
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.stages.devices import Device
from distconv.perfmodel.stages.partition import partition
from distconv.perfmodel.stages.stage_costs import COSTS, PrefixSums, stages_between

from .networks import gnmt

ADAM = 2
"""Tensors of Adam's state per parameter: the first and the second moment."""

TABLE_IV = {
    "DP": {1: 32, 2: 32, 4: 32, 8: 32},
    "PipeDream": {1: 32, 2: 32, 4: 32, 8: 32},
    "GPipe": {1: 32, 2: 42, 4: 60, 8: 74},
    "BaPipe": {1: 32, 2: 74, 4: 118, 8: 158},
}
"""Layers of the largest GNMT-L on so many GPUs."""

SYSTEMS = {"DP": PARALLEL, "GPipe": "gpipe", "BaPipe": "1f1b-sno"}
"""Schedule of each system."""


def table_iv(machine: Machine) -> Rows:
    """Print the layers of the largest GNMT that trains with Adam, in all memory and in that of 32 layers."""
    enough = _bytes(TABLE_IV["DP"][1], 1, PARALLEL, machine)
    why = ", what 32 layers need here on one GPU"
    return rows_of(machine, machine.memory_bytes, "") + rows_of(machine, enough, why)


def rows_of(machine: Machine, memory: float, why: str, counts: Sequence[int] = (1, 2, 4, 8)) -> Rows:
    """Print and return the rows of the table for GPUs with a memory limit.

    Parameters
    ----------
    machine : Machine
    memory : float
        Bytes per GPU.
    why : str
        Note printed with the limit.
    counts : sequence of int
        Numbers of GPUs.

    Returns
    -------
    list of dict
    """
    print(f"\nTable IV: layers (parameters) of the largest GNMT-L in {memory / 1e9:.2f} GB{why}; ours | paper's")
    print(f"{'':<11}" + "".join(f"{f'{gpus} GPU(s)':<28}" for gpus in counts))
    rows: Rows = []
    for system, published in TABLE_IV.items():
        print(f"{system:<11}", end="")
        for gpus in counts:
            paper = published[gpus]
            layers = largest(functools.partial(_fits, system=system, gpus=gpus, machine=machine, memory=memory))
            print(
                f"{f'{layers} ({_parameters(layers, machine)}) | {paper} ({_parameters(paper, machine)})':<28}", end=""
            )
            rows.append({"system": system, "gpus": gpus, "memory": memory, "layers": layers, "paper": paper})
        print()
    return rows


def _fits(layers: int, system: str, gpus: int, machine: Machine, memory: float) -> bool:
    if system == "PipeDream":
        return _stashed_bytes(layers, gpus, machine) <= memory
    return _bytes(layers, gpus, SYSTEMS[system], machine) <= memory


def _bytes(layers: int, gpus: int, schedule: str, machine: Machine) -> float:
    """Return the peak bytes of a device with the best split points; 32 samples each, or 2 N micro-batches of 16."""
    # 4.2.2: 32 samples per GPU, and twice as many micro-batches as stages. So 32 N samples in 2 N micro-batches of 16.
    parallel = schedule == PARALLEL or gpus == 1
    profile = gnmt(layers, 32 if parallel else 16, machine)
    # The search minimizes memory as a fraction of the limit. With a limit of 1 byte the fraction is in bytes.
    setting = ExplorationContext(profile, machine, [Device("GPU", gpus, memory=1.0)], ADAM)
    stages = setting.pipeline_candidate(
        PARALLEL if parallel else schedule, gpus if parallel else 1, gpus if parallel else 2 * gpus
    )
    # There are always more layers than GPUs.
    assert stages is not None
    return max(stages.memory(() if parallel else least_memory_cuts(stages)))


def _stashed_bytes(layers: int, gpus: int, machine: Machine) -> float:
    """Return the peak bytes of a device in PipeDream's partition, which depends on times only, with weight versions."""
    profile = gnmt(layers, 32, machine)
    bandwidth = machine.node.bandwidth_bytes_per_s
    chosen = partition(profile, gpus, bandwidth, "pipedream")
    terms = PrefixSums(profile, gpus, bandwidth, COSTS["pipedream"])
    stages = stages_between([0, *chosen.cuts, terms.size], [(count,) for count in chosen.replicas])
    # stage_bytes has a copy of the weights for each mini-batch in flight. The optimizer's state exists once.
    return max(
        float(terms.stage_bytes(s.first, s.last, s.counts, s.onward))
        + ADAM * float(terms.sum_between(terms.parameters, s.first, s.last))
        for s in stages
    )


def _parameters(layers: int, machine: Machine) -> str:
    count = sum(layer.parameter_bytes for layer in gnmt(layers, 1, machine).layers) / 4
    return f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest even number of layers that fits, if fewer always do."""
    # Even, because GNMT-L has as many encoder as decoder layers. First double, then bisect.
    low, high = 2, 4
    while fits(high):
        low, high = high, 2 * high
    while high - low > 2:
        middle = (low + high) // 4 * 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""BaPipe's split points against those searched for each schedule, and the closed forms against the event simulation.

The networks and GPUs are those of Table III, with 64 micro-batches of 32 samples and no memory limit. BaPipe splits a
network once (3.3), whichever schedule it runs. The search minimizes the closed form of one schedule.
"""

from __future__ import annotations

from distconv.jobs.papers.printed_tables import Rows
from distconv.perfmodel.exploration.candidate_stages import ExplorationContext, PipelineCandidate, round_to_layers
from distconv.perfmodel.exploration.cuts import best_cuts
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.stages.devices import Device
from distconv.pipeline import schedule, simulate

from .networks import networks

MICROBATCHES = 64
SAMPLES = 32
"""Samples of a micro-batch."""

ENOUGH_BYTES = float(1 << 60)
"""Memory that limits no split points."""


def cuts_table(machine: Machine) -> Rows:
    """Print seconds of a mini-batch by closed form and by simulation, with BaPipe's and with searched split points."""
    print(f"\nCuts: s of {MICROBATCHES} micro-batches of {SAMPLES} samples, closed form (over simulated);", end="")
    print(f" {machine.name}, {machine.node.bandwidth_bytes_per_s / 1e9:.2f} GB/s")
    print(f"{'model':<10}{'GPUs':>5}  {'schedule':<10}{'BaPipe':<18}{'searched':<18}BaPipe / searched")
    rows: Rows = []
    for model, profile in networks(machine).items():
        for gpus in (4, 8):
            setting = ExplorationContext(profile(SAMPLES), machine, [Device("GPU", gpus, memory=ENOUGH_BYTES)], 1)
            rows += [
                {"model": model, "gpus": gpus} | compare_cuts(model, setting, name) for name in ("1f1b-sno", "1f1b-so")
            ]
    ratios = [ratio for row in rows for ratio in (row["bapipe_over"], row["searched_over"]) if isinstance(ratio, float)]
    print(f"closed form over simulated: {min(ratios):.3f} to {max(ratios):.3f}, mean {sum(ratios) / len(ratios):.3f}")
    return rows


def compare_cuts(model: str, setting: ExplorationContext, name: str) -> dict[str, object]:
    """Print and return a row of the table.

    Parameters
    ----------
    model : str
    setting : ExplorationContext
        Network, machine and number of GPUs.
    name : str
        Schedule.

    Returns
    -------
    dict
    """
    stages = setting.pipeline_candidate(name, 1, MICROBATCHES)
    # There are more layers than GPUs.
    assert stages is not None
    # BaPipe balances before it chooses a schedule, and may split a layer, which GPUs cannot.
    balanced = round_to_layers(setting.balanced_partition.positions, stages.size)
    # The search starts from BaPipe's split points, so it cannot become slower.
    searched = best_cuts(stages, [balanced])
    balanced_s, searched_s = stages.time(balanced), stages.time(searched)
    over = balanced_s / simulated(stages, balanced), searched_s / simulated(stages, searched)
    print(f"{model:<10}{stages.count:>5}  {name:<10}", end="")
    print(f"{f'{balanced_s:.3f} ({over[0]:.3f})':<18}{f'{searched_s:.3f} ({over[1]:.3f})':<18}", end="")
    print(f"{balanced_s / searched_s:.3f}")
    return {
        "schedule": name,
        "bapipe_s": balanced_s,
        "searched_s": searched_s,
        "bapipe_over": over[0],
        "searched_over": over[1],
    }


def simulated(stages: PipelineCandidate, cuts: list[int]) -> float:
    """Simulate a mini-batch on one pipeline.

    Parameters
    ----------
    stages : PipelineCandidate
    cuts : list of int
        Split points.

    Returns
    -------
    float
        Seconds.
    """
    (kinds,) = stages.pipelines  # one pipeline, without replicas
    forward, backward, transfer = stages.costs(cuts, kinds)
    order = schedule(stages.schedule, stages.count, stages.microbatches)
    # The simulation has a transfer for each stage. The last stage sends nothing on.
    return simulate(order, forward, backward, transfer=[*transfer, 0.0]).makespan

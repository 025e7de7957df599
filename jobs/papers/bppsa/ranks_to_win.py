"""Number of ranks from which a scan over a recurrence is faster, predicted from machine files (critical path, 3.6).

Three algorithms are compared:

- sequential products on one rank, each of which is a kernel with its fixed cost;
- the same products, compiled into one kernel with one fixed cost;
- the best scan over p ranks, each of which has a block of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distconv.distribution import block_range
from distconv.jobs.papers.printed_tables import Rows
from distconv.kernels.scan import SPEEDS, Problem, Size, Speed, predict
from distconv.perfmodel.machine.machine import Machine

MOST_RANKS = 4096
"""Maximum number of ranks that is considered."""


def speed_of(machine: Machine) -> Speed:
    """Return the speed of a rank: float32, messages over the network, sparse products at the speed of memory."""
    roofline = machine.computing(1).roofline
    # 2 FLOP read two indices and two values, counted as 8 bytes each. Dense recurrences do not depend on this rate.
    sparse = roofline.bytes_per_s / 16
    link = machine.network
    return Speed(
        roofline.kernel_s,
        roofline.kernel_s,
        roofline.flops_per_s,
        sparse,
        roofline.bytes_per_s,
        link.latency_s,
        link.bandwidth_bytes_per_s,
    )


def recurrence(steps: int, width: int, batch: int, ranks: int) -> Problem:
    """Return a recurrence of dense Jacobians, of which each rank has a block.

    Parameters
    ----------
    steps : int
        Number of Jacobians.
    width : int
        Size of a state.
    batch : int
        Samples of a mini-batch.
    ranks : int

    Returns
    -------
    Problem
    """
    counts = (len(block_range(steps, ranks, rank)) for rank in range(ranks))
    return Problem((batch, width), "", tuple((Size(width, width, 1.0, batch, n),) for n in counts if n), stacked=True)


def first_to_win(steps: int, width: int, batch: int, speed: Speed, against_s: float) -> tuple[int | None, float]:
    """Find the smallest power of two of ranks on which a scan is faster than a given time.

    Parameters
    ----------
    steps : int
        Number of Jacobians.
    width : int
        Size of a state.
    batch : int
        Samples of a mini-batch.
    speed : Speed
        Speed of the machine.
    against_s : float
        Time to beat, in seconds.

    Returns
    -------
    (int or None, float)
        Number of ranks, or None if no number is fast enough; and the shortest time over all numbers of ranks, in
        seconds.
    """
    best, first, ranks = float("inf"), None, 1
    while ranks <= min(MOST_RANKS, steps):
        times = predict(recurrence(steps, width, batch, ranks), speed).times_s
        scan_s = min(times["blelloch"], times["truncated"])
        if first is None and scan_s < against_s:
            first = ranks
        best, ranks = min(best, scan_s), 2 * ranks
    return first, best


def table(machines: Sequence[str], cases: Sequence[tuple[int, int, int]]) -> Rows:
    """Print a row for each machine and case; the first machine is what ``method="auto"`` assumes.

    Parameters
    ----------
    machines : sequence of str
        Names or files.
    cases : sequence of (int, int, int)
        Steps, width and batch of each case.

    Returns
    -------
    list of dict
    """
    print("\nAt how many ranks a scan would win over a recurrence, float32, predicted from machine files")
    print(f"{'machine':<12}{'T':>7}{'H':>5}{'B':>4}{'calls ms':>11}{'ranks':>7}{'compiled ms':>13}{'ranks':>7}", end="")
    print(f"{'best scan ms':>14}")
    rows: Rows = []
    speeds = {"a core": SPEEDS["cpu"]} | {name: speed_of(Machine.load(name)) for name in machines}
    for name, speed in speeds.items():
        for steps, width, batch in cases:
            alone = recurrence(steps, width, batch, 1)
            calls_s = predict(alone, speed).times_s["linear"]
            # One call instead of one for each product.
            compiled_s = speed.call_s + predict(alone, replace(speed, call_s=0.0)).times_s["linear"]
            over_calls, best_s = first_to_win(steps, width, batch, speed, calls_s)
            over_compiled, _ = first_to_win(steps, width, batch, speed, compiled_s)
            print(f"{name:<12}{steps:>7}{width:>5}{batch:>4}{1e3 * calls_s:>11.2f}{over_calls or 'never':>7}", end="")
            print(f"{1e3 * compiled_s:>13.3f}{over_compiled or 'never':>7}{1e3 * best_s:>14.3f}")
            rows.append({"machine": name, "steps": steps, "width": width, "batch": batch, "calls_s": calls_s})
            rows[-1] |= {"compiled_s": compiled_s, "best_scan_s": best_s}
            rows[-1] |= {"ranks_over_calls": over_calls, "ranks_over_compiled": over_compiled}
    return rows

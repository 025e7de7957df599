"""Order of passes on each stage, one short pure function for each family of schedules.

Each function returns the passes of every stage. :mod:`.registry` then adds weight versions (:mod:`.weight_policy`) and
messages (:mod:`.send_receive`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .actions import Kind


class SchedulePass(NamedTuple):
    """One pass of one micro-batch through one chunk, or a switch of schedules."""

    kind: Kind
    microbatch: int | None
    chunk: int = 0


Orders = list[list[SchedulePass]]


def alternating(microbatches: int, in_flight: int) -> list[SchedulePass]:
    """Return one stage of 1F1B: forwards until ``in_flight`` micro-batches are in flight, then B and F alternate.

    Parameters
    ----------
    microbatches : int
    in_flight : int

    Returns
    -------
    list of SchedulePass

    Examples
    --------
    >>> [f"{step.kind}{step.microbatch}" for step in alternating(3, 2)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    ahead = min(in_flight, microbatches)
    steps = [SchedulePass(Kind.F, m) for m in range(ahead)]
    for m in range(microbatches):
        steps.append(SchedulePass(Kind.B, m))
        if m + ahead < microbatches:
            steps.append(SchedulePass(Kind.F, m + ahead))
    return steps


def gpipe(stages: int, microbatches: int) -> Orders:
    """Return all forwards, then all backwards.

    Backwards have the order of the forwards, so that gradients add up micro-batch by micro-batch as in one process.

    Source: Huang et al. 2019 (GPipe).

    Parameters
    ----------
    stages, microbatches : int

    Returns
    -------
    list of list of SchedulePass
        One list per stage.
    """
    forward = [SchedulePass(Kind.F, m) for m in range(microbatches)]
    backward = [SchedulePass(Kind.B, m) for m in range(microbatches)]
    return [forward + backward for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> Orders:
    """Return 1F1B: at most N - i + 1 micro-batches are in flight on stage i of 1..N.

    Source: Zhao et al. 2020 (BaPipe), Figures 5a and 6a.

    Parameters
    ----------
    stages, microbatches : int

    Returns
    -------
    list of list of SchedulePass
        One list per stage.
    """
    return [alternating(microbatches, stages - stage) for stage in range(stages)]


def doubled_warm_up(stages: int, microbatches: int) -> Orders:
    """Return 1F1B with at most 2(N - i + 1) micro-batches in flight on stage i of 1..N.

    Transfers then overlap with other micro-batches. In FBP-AS each F runs at the same time as the B that follows it in
    this order.

    Source: Zhao et al. 2020 (BaPipe), Figures 5b and 6b.

    Parameters
    ----------
    stages, microbatches : int

    Returns
    -------
    list of list of SchedulePass
        One list per stage.
    """
    return [alternating(microbatches, 2 * (stages - stage)) for stage in range(stages)]


def pipedream(stages: int, microbatches: int, replicas: Sequence[int]) -> Orders:
    """Return 1F1B for stages with different numbers of replicas.

    Each replica keeps ceil(ranks from this stage on / replicas of this stage) mini-batches in flight. A stage keeps at
    most as many as the stage before it, which is where they come from.

    Source: Harlap et al. 2018 (NUM_OPT_ACTIVE_MINIBATCHES and 1F1B round robin); Zhai et al. 2020 (SparsePipe), III-A.

    Parameters
    ----------
    stages, microbatches : int
    replicas : sequence of int
        Ranks of each stage.

    Returns
    -------
    list of list of SchedulePass
        One list per stage.
    """
    # Of all replicas together: each has every ``here``-th mini-batch of its stage's list.
    in_flight = (here * -(-sum(replicas[stage:]) // here) for stage, here in enumerate(replicas))
    return [alternating(microbatches, count) for count in itertools.accumulate(in_flight, min)]


def stale(stages: int, microbatches: int, switch_after: int) -> Orders:
    """Return the cycles of stale weights, followed by training without pipelining (hybrid).

    The N = K + 1 stages are separated by K pairs of pipeline registers. Mini-batch m is in forward stage i (1..K+1) in
    cycle m + i - 1, and in its backward stage in cycle m + 2K + 1 - i. So 2(K - i + 1) cycles, and as many updates, lie
    between the two passes.

    Source: Zhang, Abdelrahman 2021 (stale weights), 4.1 and 4.2.

    Parameters
    ----------
    stages, microbatches : int
    switch_after : int
        Mini-batches that are pipelined.

    Returns
    -------
    list of list of SchedulePass
        One list per stage.
    """
    rest = [SchedulePass(kind, m) for m in range(switch_after, microbatches) for kind in (Kind.F, Kind.B)]
    tail = [SchedulePass(Kind.SWITCH, None), *rest] if rest else []
    # In a cycle F precedes B, so the F of the present cycle is in flight, too: 2 (K - i + 1) + 1, where i is stage + 1.
    return [alternating(switch_after, 2 * (stages - 1 - stage) + 1) + tail for stage in range(stages)]


def interleaved(stages: int, microbatches: int, chunks: int) -> Orders:
    """Return 1F1B over several parts on each stage, in groups of N micro-batches.

    A smaller last group keeps the order of a full one, without the missing micro-batches.

    Source: Narayanan et al. 2021, 2.2.

    Parameters
    ----------
    stages, microbatches : int
    chunks : int
        Parts on each stage.

    Returns
    -------
    list of list of SchedulePass
        One list per stage.
    """
    if chunks == 1:
        return one_f_one_b(stages, microbatches)
    # The last group is full here, too. Its missing micro-batches are dropped at the end, so the order stays the same.
    groups = [range(start, start + stages) for start in range(0, microbatches, stages)]
    forward = [SchedulePass(Kind.F, m, c) for group in groups for c in range(chunks) for m in group]
    backward = [SchedulePass(Kind.B, m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    orders = []
    for stage in range(stages):
        # 2 (N - 1 - stage) forwards hide the way to the last stage and back, N for each further chunk precede the first
        # backward, and one belongs to the first pair of F and B.
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, len(forward))
        late = forward[ahead:]
        paired = [step for pair in zip(backward, late, strict=False) for step in pair]
        full = forward[:ahead] + paired + backward[len(late) :]
        orders.append([step for step in full if step.microbatch in range(microbatches)])
    return orders


def zero_bubble(stages: int, microbatches: int) -> Orders:
    """Return 1F1B whose W on stage i of 0..N-1 follows its B by i micro-batches: N are in flight on each stage.

    At the end, W passes fill the time in which 1F1B waits for gradients.

    Source: Qi et al. 2024 (ZB-H1).

    Parameters
    ----------
    stages, microbatches : int

    Returns
    -------
    list of list of SchedulePass
        One list per stage.
    """
    orders = []
    for stage in range(stages):
        steps: list[SchedulePass] = []
        for step in alternating(microbatches, stages - stage):
            steps.append(step)
            if step.kind is Kind.B and step.microbatch is not None and step.microbatch >= stage:
                steps.append(SchedulePass(Kind.W, step.microbatch - stage))
        done = max(0, microbatches - stage)  # micro-batches whose W is placed; the others follow the last B
        orders.append(steps + [SchedulePass(Kind.W, m) for m in range(done, microbatches)])
    return orders

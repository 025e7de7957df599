"""Time of a mini-batch and micro-batches in flight of BaPipe's schedules, in closed form.

:func:`.explore` calls the functions for every combination, where a simulation of events would take too long.

There are N stages and M micro-batches. F and B are the forward and the backward pass of one micro-batch on a stage. The
order of passes on a stage makes chains of passes that wait for each other. In 1F1B with K_i micro-batches in flight on
stage i, one such chain leads from stage i up to stage j, turns, and comes back to i::

    F_i -> F_i+1 -> ... -> F_j    of one micro-batch
                            |     then the next B of stage j, of the micro-batch K_j - 1 before
    B_i <- B_i+1 <- ... <- B_j    and then the next F of stage i, K_i micro-batches later

So K_i - K_j + 1 micro-batches take at least F and B of these stages and twice the transfers between them. In addition,
a link carries one message at a time in each direction, so no micro-batch takes less than the longest transfer. In
1F1B-AS and FBP-AS a message is in flight from the start of its pass, so only the time by which it exceeds the pass
counts; FBP-AS gives each direction half of the link. The time of a mini-batch has two parts. The first micro-batch goes
to the last stage and back. Then chains, each as often as needed, cover the other M - 1 micro-batches; the longest such
multiset of chains counts. For equal stages this is BaPipe's Tables I and II, for every M >= 1, as long as transfers
take no longer than the tables assume (1F1B-AS: F; FBP-AS and, here, 1F1B-SO: half of F + B).

The paper gives no formula for unequal stages. The closed forms were compared with the event simulation of 600 random
pipelines for each schedule (2 to 6 stages whose times differ by up to a factor of two, 1 to 32 micro-batches, transfers
shorter than a forward pass; for synchronous schedules the simulation does not limit a link).
``tests/perfmodel/stages/test_closed_forms.py`` draws them and checks the first 150. The closed forms are 1.5 to 4 %
longer on average and at most 15 (1F1B-SNO), 17 (1F1B-AS), 22 (1F1B-SO) and 23 % (FBP-AS), because they charge full
chains from the start. 1F1B-SO and FBP-AS are up to 0.4 % shorter, 1F1B-SNO and AS never; GPipe is exact. On links
slower than the tables assume, FBP-AS is up to 17 % shorter.

Source: Zhao et al. 2020 (BaPipe), 3.2, Tables I and II; Huang et al. 2019 (GPipe).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClosedForm:
    """Properties of a schedule that its closed form depends on.

    Attributes
    ----------
    copies : int
        K_i is ``copies * (N - i + 1)`` on stage i of 1 to N, and ``copies * (N - i) + 1`` if the schedule is endless.
    hidden : bool
        True if results are passed on while they are computed, which BaPipe calls asynchronous. Otherwise after the
        pass.
    flushed : bool
        True if all micro-batches go forward before one goes back (GPipe). Otherwise they alternate.
    endless : bool
        True if each mini-batch is one pass, and the next one follows before it ends. Otherwise the pipeline empties.
    stashed : bool
        True if the weights of each mini-batch in flight are kept. Otherwise there is one copy.
    """

    copies: int = 1
    hidden: bool = False
    flushed: bool = False
    endless: bool = False
    stashed: bool = False


SCHEDULES: Mapping[str, ClosedForm] = {
    "1f1b-sno": ClosedForm(),
    "1f1b-so": ClosedForm(copies=2),
    "1f1b-as": ClosedForm(hidden=True),
    "fbp-as": ClosedForm(copies=2, hidden=True),
    "gpipe": ClosedForm(flushed=True),
    "pipedream": ClosedForm(endless=True, stashed=True),
    "stale": ClosedForm(copies=2, endless=True),
}
"""Closed forms by the names of ``distconv.pipeline.schedule``."""


def in_flight(schedule: str, stages: int, microbatches: int) -> list[int]:
    """Return the number of micro-batches whose activations each stage keeps at a time.

    Source: Zhao et al. 2020 (BaPipe), Tables I and II.

    Parameters
    ----------
    schedule : str
        Key of ``SCHEDULES``.
    stages : int
        Number of stages.
    microbatches : int
        Micro-batches of a mini-batch.

    Returns
    -------
    list of int
        One entry per stage.

    Examples
    --------
    >>> in_flight("1f1b-sno", 3, 8), in_flight("1f1b-so", 3, 4), in_flight("gpipe", 3, 8)
    ([3, 2, 1], [4, 4, 2], [8, 8, 8])
    """
    form = SCHEDULES[schedule]
    if form.flushed:
        return [microbatches] * stages
    if form.endless:
        return [form.copies * (stages - stage - 1) + 1 for stage in range(stages)]
    return [min(microbatches, form.copies * (stages - stage)) for stage in range(stages)]


def minibatch_time(
    schedule: str, forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], microbatches: int
) -> float:
    """Return the time of a mini-batch.

    For an endless schedule it is the time of ``microbatches`` mini-batches in the full pipeline.

    Source: Zhao et al. 2020 (BaPipe), 3.2, Tables I and II.

    Parameters
    ----------
    schedule : str
        Key of ``SCHEDULES``.
    forward, backward : sequence of float
        Seconds of one micro-batch on each stage (F and B).
    transfer : sequence of float
        Seconds of one message between each stage and the next (SR).
    microbatches : int
        Number of micro-batches.

    Returns
    -------
    float
        Seconds.

    Examples
    --------
    >>> [minibatch_time(name, [1] * 3, [2] * 3, [0.5] * 2, 8) for name in ("1f1b-as", "1f1b-sno", "1f1b-so")]
    [30.0, 36.0, 32.0]
    """
    form = SCHEDULES[schedule]
    passes = [f + b for f, b in zip(forward, backward, strict=True)]
    turns = [2 * seconds for seconds in transfer]
    link = max(transfer, default=0.0)
    if form.hidden:
        link *= form.copies  # FBP-AS gives each direction half of the link
        # Seconds in which a stage makes an activation and a gradient. In FBP-AS, F and B share the stage and end
        # together.
        making = (passes, passes) if form.copies > 1 else (forward, backward)
        turns = [
            max(0.0, form.copies * seconds - making[0][i]) + max(0.0, form.copies * seconds - making[1][i + 1])
            for i, seconds in enumerate(transfer)
        ]
    first = sum(passes) + sum(turns)
    # GPipe: all micro-batches go forward, then all go back; the slowest stage or link sets the rhythm of each.
    if form.flushed:
        return first + (microbatches - 1) * (max(link, *forward) + max(link, *backward))
    chains = [*_chains(passes, turns, form.copies), (1, link)]
    # In a full pipeline, the chain with the most time per micro-batch sets the rhythm.
    if form.endless:
        return microbatches * max(length / count for count, length in chains)
    return first + _longest_chains(chains, microbatches - 1)


def _chains(passes: Sequence[float], turns: Sequence[float], copies: int) -> list[tuple[int, float]]:
    """Return micro-batches and seconds of the chain between each two stages; of equal numbers the longest."""
    longest: dict[int, float] = {}
    for first in range(len(passes)):
        length = 0.0
        # Each stage further adds its passes and the transfers to it and back.
        for last in range(first, len(passes)):
            length += passes[last] + (turns[last - 1] if last > first else 0.0)
            count = copies * (last - first) + 1
            longest[count] = max(longest.get(count, 0.0), length)
    return list(longest.items())


def _longest_chains(chains: Sequence[tuple[int, float]], microbatches: int) -> float:
    """Return the longest time of a multiset of chains of at most ``microbatches`` in total: an unbounded knapsack.

    The best chain is the longest one per micro-batch, and has ``count`` micro-batches. A solution needs fewer than
    ``count`` other chains. Among ``count`` numbers, some add up to a multiple of ``count``, so the best chain can
    replace these chains without making the sum shorter. Only the remaining micro-batches need the dynamic program.
    """
    # Of equal chains that with the fewest micro-batches, which leaves the smallest dynamic program.
    count, length = max(chains, key=lambda chain: (chain[1] / chain[0], -chain[0]))
    # `times` chains of the best kind are certain. Only what is left for the fewer than `count` others is searched.
    others = count * max(size for size, _ in chains)
    times = max(0, -(-(microbatches - others) // count))
    rest = microbatches - times * count
    best = [0.0] * (rest + 1)
    for size in range(1, rest + 1):
        best[size] = max(best[size - 1], *(best[size - c] + t for c, t in chains if c <= size))
    return times * length + best[rest]

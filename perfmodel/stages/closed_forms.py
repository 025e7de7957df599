"""How long a mini-batch takes in BaPipe's schedules, in closed form, and what a stage keeps meanwhile.

A stage's list makes chains of passes that wait for each other. In 1F1B with K_i micro-batches in flight on stage i one
such chain leads from stage i up to stage j, turns, and comes back to i:

    F_i -> F_i+1 -> ... -> F_j    of one micro-batch
                            |     then its stage's next B, of the micro-batch K_j - 1 before
    B_i <- B_i+1 <- ... <- B_j    and then stage i's next F, K_i micro-batches on

So K_i - K_j + 1 micro-batches take at least F and B of these stages and twice the transfers between them. Beside that a
link carries one message at a time in each direction, so that no micro-batch takes less than the longest transfer. In
1F1B-AS and FBP-AS a message is on its way from when its pass begins: what counts of it is by how much it takes longer
than that, in FBP-AS with half of the link for each direction. The time of a mini-batch is that of the first micro-batch
on its way to the last stage and back, and of the worst multiset of such chains for the other M - 1. Where all stages
are alike this is BaPipe's Tables I and II, for every M >= 1, as long as transfers take no longer than the tables assume
(1F1B-AS: F; FBP-AS and, here, 1F1B-SO: half of F + B).

For other stages it is what the paper does not give. Against the event simulation of 600 random pipelines each (2 to 6
stages whose times differ by up to a factor of two, 1 to 32 micro-batches, transfers shorter than a forward pass: of the
synchronous schedules the simulation has no limit of a link; tests/perfmodel/stages/test_closed_forms.py draws them and
checks the first 150) it was 1.5 to 4 % longer in the mean and at most 15 (1F1B-SNO), 17 (1F1B-AS), 22 (1F1B-SO) and 23
% (FBP-AS), because it charges whole chains from the start on. 1F1B-SO and FBP-AS were up to 0.4 % shorter, 1F1B-SNO and
AS never; GPipe's is exact. On links slower than the tables ask for FBP-AS was up to 17 % shorter.

Source: Zhao et al. 2020 (BaPipe), 3.2, Tables I and II; Huang et al. 2019 (GPipe).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """``copies``: K_i is that times N - i + 1. ``hidden``: results are passed on while they are computed.

    ``flushed``: all micro-batches go forward before one goes back (GPipe). ``endless``: each mini-batch is one pass,
    and the next follows it before it is done; ``stashed``: its weights are kept until then.
    """

    copies: int = 1
    hidden: bool = False
    flushed: bool = False
    endless: bool = False
    stashed: bool = False


SCHEDULES: Mapping[str, Form] = {
    "1f1b-sno": Form(),
    "1f1b-so": Form(copies=2),
    "1f1b-as": Form(hidden=True),
    "fbp-as": Form(copies=2, hidden=True),
    "gpipe": Form(flushed=True),
    "pipedream": Form(endless=True, stashed=True),
    "stale": Form(copies=2, endless=True),
}
"""By the names of ``distconv.pipeline.schedule``."""


def in_flight(schedule: str, stages: int, microbatches: int) -> list[int]:
    """Micro-batches whose activations each stage keeps at a time.

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
    """Seconds of ``microbatches`` micro-batches. Of one of them: F and B of each stage, SR of each boundary between.

    Of an endless schedule they are mini-batches, in the full pipeline: what each takes longer.

    >>> [minibatch_time(name, [1] * 3, [2] * 3, [0.5] * 2, 8) for name in ("1f1b-as", "1f1b-sno", "1f1b-so")]
    [30.0, 36.0, 32.0]
    """
    form = SCHEDULES[schedule]
    passes = [f + b for f, b in zip(forward, backward, strict=True)]
    turns = [2 * seconds for seconds in transfer]
    link = max(transfer, default=0.0)
    if form.hidden:
        link *= form.copies  # FBP-AS: half of it in each direction
        making = (passes, passes) if form.copies > 1 else (forward, backward)
        turns = [
            max(0.0, form.copies * seconds - making[0][i]) + max(0.0, form.copies * seconds - making[1][i + 1])
            for i, seconds in enumerate(transfer)
        ]
    first = sum(passes) + sum(turns)
    if form.flushed:
        return first + (microbatches - 1) * (max(link, *forward) + max(link, *backward))
    chains = [*_chains(passes, turns, form.copies), (1, link)]
    if form.endless:
        return microbatches * max(length / count for count, length in chains)
    return first + _worst(chains, microbatches - 1)


def _chains(passes: Sequence[float], turns: Sequence[float], copies: int) -> list[tuple[int, float]]:
    """Micro-batches and seconds of the chain between each two stages; of equal numbers the longest."""
    longest: dict[int, float] = {}
    for first in range(len(passes)):
        length = 0.0
        for last in range(first, len(passes)):
            length += passes[last] + (turns[last - 1] if last > first else 0.0)
            count = copies * (last - first) + 1
            longest[count] = max(longest.get(count, 0.0), length)
    return list(longest.items())


def _worst(chains: Sequence[tuple[int, float]], microbatches: int) -> float:
    """The longest time of a multiset of chains of at most so many micro-batches in all: an unbounded knapsack.

    All but a few are the chain that is longest per micro-batch: of any ``count`` others some make up a multiple of its
    ``count`` micro-batches, and exchanging those for it makes nothing shorter.
    """
    count, length = max(chains, key=lambda chain: (chain[1] / chain[0], -chain[0]))
    others = count * max(size for size, _ in chains)
    times = max(0, -(-(microbatches - others) // count))
    rest = microbatches - times * count
    best = [0.0] * (rest + 1)
    for size in range(1, rest + 1):
        best[size] = max(best[size - 1], *(best[size - c] + t for c, t in chains if c <= size))
    return times * length + best[rest]

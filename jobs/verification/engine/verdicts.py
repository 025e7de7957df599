"""Verdicts on a case on one layout: their kinds, the comparison of results, and the decision over all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from distconv.distribution import Distribution
from distconv.errors import DistconvError
from distconv.memory_format import memory_format
from distconv.tensor import DistTensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest error, relative to the largest value of the tensor."""

_SMALL = 1e-2
"""Lower bound of the scale of a tensor, for results that cancel to nearly zero."""

_NOT_FINITE = "is infinite or NaN where torch's is not, or not where it is"

_WAY_OUT = re.compile(
    r"(?:[;:(,] ?(?:first )?(?:or )?|\. )"
    r"(add|apply|assign|call|choose|clone|compute|convert|create|gather|give|index|leave|load|make|move|omit|pass|permute"
    r"|put|redistribute|replicate|reshape|run|save|say|scatter|set|split|start|take|use|write)\b",
    re.IGNORECASE,
)
"""Pattern of a clause or a sentence that begins with a suggested fix."""


class Verdict(Enum):
    """Verdict on a case on one layout.

    - EXACT: the results agree with torch. REDISTRIBUTES: the same, after redistributions. REPLICATES: the same, but
      every rank computed the full result.
    - RAISES: all ranks raise an UnsupportedOperation or another DistconvError with a suggested fix.
    - REFUSED: torch rejects the case, and distconv raises with torch's message. OTHER_WORDS: with another message.
    - INFINITE: an input has infinities, and NaN has other positions than in torch's result. A block is padded with
      zeros where torch has neighbors, and zero times infinity is NaN. Such inputs occur only in diverged trainings.
    - WRONG: a different value or memory format, or different outcomes on ranks.
    - UNCLEAR: an error that distconv did not raise, or without a suggested fix.
    - HANGS: the job hung or ended in the case.
    """

    EXACT = "exact"
    REDISTRIBUTES = "redistributes"
    REPLICATES = "replicates"
    RAISES = "raises"
    REFUSED = "refused as torch does"
    OTHER_WORDS = "refused in other words"
    INFINITE = "differs at infinities"
    WRONG = "WRONG"
    UNCLEAR = "UNCLEAR"
    HANGS = "HANGS"


EXACT = frozenset({Verdict.EXACT, Verdict.REDISTRIBUTES, Verdict.REPLICATES})
"""Verdicts of results that agree with torch."""

BAD = frozenset({Verdict.WRONG, Verdict.UNCLEAR, Verdict.HANGS})
"""Verdicts with which a run fails."""


class Refusal(NamedTuple):
    """An exception that a case raised on one rank."""

    kind: str
    """Name of its class."""
    text: str
    """Its message."""
    on_purpose: bool
    """True for a DistconvError. Otherwise distconv did not raise it deliberately."""


class RankOutcome(NamedTuple):
    """Outcome of a case on one rank."""

    refusal: Refusal | None = None
    difference: str = ""
    """The first result that differs from the reference."""


def refusal(error: Exception) -> Refusal:
    """Return an error as it is compared between ranks."""
    return Refusal(type(error).__name__, str(error), isinstance(error, DistconvError))


def difference(
    reference: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], condition: float = 1.0
) -> str:
    """Return the first difference between results, or an empty string.

    Only the block of this rank is compared. Nothing is sent, so that a mistake of one rank leaves no other
    waiting.

    Parameters
    ----------
    reference : mapping of str to torch.Tensor
        Results of plain torch.
    actual : mapping of str to torch.Tensor
        Results of this rank.
    condition : float
        Factor on the usual round-off error.

    Returns
    -------
    str
    """
    for name, expected in reference.items():
        if name not in actual:
            return f"{name} is missing"
        text = _deviation(expected, actual[name], condition)
        if text:
            return f"{name} {text}"
    extra = set(actual) - set(reference)
    return f"{min(extra)} should not be there" if extra else ""


def _deviation(expected: torch.Tensor, actual: torch.Tensor, condition: float) -> str:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"is {tuple(actual.shape)} {actual.dtype}, torch has {tuple(expected.shape)} {expected.dtype}"
    whole = expected = expected.detach()
    if isinstance(actual, DistTensor):
        if tuple(actual.local.shape) != actual.dist.local_shape(actual.shape):
            return (
                f"is a block of {tuple(actual.local.shape)} where it should be {actual.dist.local_shape(actual.shape)}"
            )
        expected, actual = _block(expected, actual.dist), actual.local
        order = memory_format(whole)
        formatted = order is not torch.contiguous_format and actual.numel() > 0
        if formatted and not actual.is_contiguous(memory_format=order):
            return f"is a block of strides {actual.stride()}, but torch's result is {order}"
    actual = actual.detach()
    if expected.is_complex():
        whole, expected, actual = (torch.view_as_real(t.resolve_conj()) for t in (whole, expected, actual))
    if torch.equal(expected, actual):
        return ""
    if not expected.is_floating_point():
        wrong = int((expected != actual).sum())
        return f"differs in {wrong} of {expected.numel()}" if wrong else ""
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return _NOT_FINITE
    # Infinities have one sign, and NaN, which does not equal itself, is where NaN is.
    theirs, ours = expected[~finite], actual[~finite]
    if not ((theirs == ours) | (theirs.isnan() & ours.isnan())).all():
        return _NOT_FINITE
    error = (expected - actual)[finite].abs()
    if not error.numel():
        return ""
    # The scale is that of the full tensor, because a block may have small values only.
    worst = float(error.max())
    scale = max(float(whole[whole.isfinite()].abs().max()), _SMALL) if worst else 0.0
    limit = TOLERANCE[expected.dtype] * scale * condition
    if worst <= limit:
        return ""
    count = int((error > limit).sum())
    return f"{tuple(expected.shape)} differs by {worst:.3g} (scale {scale:.3g}) in {count} values"


def _block(whole: torch.Tensor, dist: Distribution) -> torch.Tensor:
    """Return this rank's block of ``whole`` under ``dist``, selected index by index."""
    for dim, extent in enumerate(whole.shape):
        if dist.split[dim] is not None:
            owned = dist.intervals(dim, dist.coordinate(dim), extent)
            index = torch.cat([torch.arange(0), *(torch.arange(i.start, i.stop) for i in owned)])
            whole = (
                torch.stack([whole.select(dim, int(i)) for i in index], dim) if len(index) else whole.narrow(dim, 0, 0)
            )
    return whole


def classify(
    reference: Refusal | None, outcomes: Sequence[RankOutcome], *, infinite: bool = False
) -> tuple[Verdict, str]:
    """Return the verdict on a case and its message.

    Parameters
    ----------
    reference : Refusal or None
        Error of torch, if it rejects the case.
    outcomes : sequence of RankOutcome
        Outcome of each rank.
    infinite : bool
        True if the inputs contain infinities or NaN.

    Returns
    -------
    (Verdict, str)
    """
    refusals = {outcome.refusal for outcome in outcomes}
    if len(refusals) > 1:
        return Verdict.WRONG, "ranks differ: " + _by_rank([_describe_outcome(outcome) for outcome in outcomes])
    (common,) = refusals
    if common is None:
        return _judge_results(reference, [outcome.difference for outcome in outcomes], infinite)
    if reference is not None and common.kind != "UnsupportedOperation":
        words = reference.text.splitlines()[0].strip() if reference.text else ""
        if words in common.text and (common.on_purpose or common.kind == reference.kind):
            return Verdict.REFUSED, common.text
        if common.on_purpose:
            return Verdict.OTHER_WORDS, f"torch says {words!r}, distconv {common.text!r}"
    if not common.on_purpose:
        return Verdict.UNCLEAR, f"{common.kind}: {common.text}"
    return (Verdict.RAISES if suggests_fix(common.text) else Verdict.UNCLEAR), common.text


def _judge_results(reference: Refusal | None, differences: Sequence[str], infinite: bool) -> tuple[Verdict, str]:
    if reference is not None:
        return Verdict.WRONG, f"torch refuses: {reference.text!r}"
    if not any(differences):
        return Verdict.EXACT, ""
    text = _by_rank(differences)
    return (Verdict.INFINITE if infinite and _NOT_FINITE in text else Verdict.WRONG), text


def suggests_fix(text: str) -> bool:
    """Return True if a message says what to do instead: one of its clauses after the first is an imperative.

    >>> suggests_fix("it has no rule; gather it first"), suggests_fix("channels must not be split")
    (True, False)
    """
    return _WAY_OUT.search(text) is not None


def _by_rank(texts: Sequence[str]) -> str:
    """Return each different message with the first rank that has it."""
    return "; ".join(f"rank {texts.index(text)}: {text}" for text in dict.fromkeys(texts) if text)


def _describe_outcome(outcome: RankOutcome) -> str:
    if outcome.refusal is None:
        return "computes"
    return f"raises {outcome.refusal.kind}: {outcome.refusal.text.splitlines()[0] if outcome.refusal.text else ''}"

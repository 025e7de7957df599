"""The page ``docs/evidence/torch-samples.md``: results of torch's samples and DTensor's, and unsupported calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distconv.jobs.verification.conformance.page import general, machine, table
from distconv.jobs.verification.engine.journal import Line
from distconv.jobs.verification.engine.verdicts import EXACT, Verdict

FAMILY, DTENSOR = "torch-samples", "dtensor"
"""Families of the lines of distconv and of torch's DTensor."""

_PREFACE = """\
# torch's own samples

<!-- Generated; do not edit. Command: distconv verify conformance {options} -->

The calls with which torch tests its operators (OpInfo) and modules (ModuleInfo), including their variants in place and
with `out=`, in float64; {most}. All tensors, or only the first, are split along
their first dimension, their last, or both. All results, gradients and buffers are compared with one process. Samples
that torch rejects are excluded.

Environment: {machine}

- *by a rule*: exact by distributed rules; *replicates*: exact, with a warning, computed replicated on every rank.
- *raises*: an error with a suggested fix, identical on all ranks; *unclear*: any other exception.
- *wrong*: a different number, or ranks that disagree; *hangs*: did not end, or the job ended.
"""
_DTENSOR_PREFACE = """
## Comparison with torch's DTensor

Samples that both could start, every tensor split along its last dimension. DTensor uses gloo, with replicated
parameters of modules. It *raises* if the exception mentions DTensor or sharding. Random numbers that differ from one
process count as wrong.
"""

_HEADS = ["by a rule", "replicates", "raises", "unclear", "wrong", "hangs", "exact"]

_SILENT = {Verdict.WRONG, Verdict.HANGS}
"""Verdicts of which a user may get no error."""

# Verdicts of each column of _HEADS but the last, which is the fraction of exact results.
_GROUPS = [
    {Verdict.EXACT, Verdict.REDISTRIBUTES}, {Verdict.REPLICATES}, {Verdict.RAISES}, {Verdict.UNCLEAR}, {Verdict.WRONG},
    {Verdict.HANGS},
]  # fmt: skip


def page(lines: Sequence[Line], most: int | None = None) -> str:
    """Return the page of results.

    Parameters
    ----------
    lines : sequence of Line
        Results for one or several numbers of ranks.
    most : int, optional
        Number of samples of each variant that were run. None: all.

    Returns
    -------
    str
    """
    counts = sorted({line.ranks for line in lines})
    own = [line for line in lines if line.family == FAMILY]
    families = " ".join(dict.fromkeys(line.family for line in lines))
    options = f"--family {families} --ranks {','.join(map(str, counts))} --page docs/evidence/torch-samples.md"
    preface = _PREFACE.format(
        options=options + (f" --samples {most}" if most else ""),
        most=f"the first {most} of each" if most else "all of them",
        machine=machine(),
    )
    heads = ["ranks", "cases", *_HEADS]
    rows = [[str(n), *_row([line for line in own if line.ranks == n])] for n in counts]
    return preface + "\n" + table(heads, rows) + _compare_with_dtensor(lines) + _inexact_results(own)


def _row(lines: Sequence[Line]) -> list[str]:
    exact = sum(line.verdict in EXACT for line in lines)
    groups = [sum(line.verdict in group for line in lines) for group in _GROUPS]
    return [f"{len(lines):,}", *(f"{count:,}" for count in groups), f"{exact / max(1, len(lines)):.2%}"]


def _compare_with_dtensor(lines: Sequence[Line]) -> str:
    counts = sorted({line.ranks for line in lines if line.family == DTENSOR})
    if not counts:
        return ""
    rows, wrong = [], Counter[str]()
    for ranks in counts:
        # DTensor runs on one layout, "last". A line of a job that hung has no layout.
        here = [line for line in lines if line.ranks == ranks and line.layout in ("last", "")]
        ours, theirs = ({_name(line): line for line in here if line.family == each} for each in (FAMILY, DTENSOR))
        # Either may lack samples: distconv's if torch rejects them, DTensor's if it cannot start them.
        both = ours.keys() & theirs.keys()
        rows += [
            [str(ranks), who, *_row([lines_of[name] for name in both])]
            for who, lines_of in (("distconv", ours), ("DTensor", theirs))
        ]
        wrong.update(operator for operator, option in both if theirs[operator, option].verdict in _SILENT)
    named = ", ".join(f"`{operator}` ({count})" for operator, count in sorted(wrong.items()))
    text = f"\nDTensor is wrong or hangs with: {named}.\n" if wrong else ""
    return _DTENSOR_PREFACE + "\n" + table(["ranks", "computed by", "samples", *_HEADS], rows) + text


def _name(line: Line) -> tuple[str, str]:
    return line.operator, line.option


def _inexact_results(lines: Sequence[Line]) -> str:
    """Return each message once, with its count and its operators."""
    by_text: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.verdict not in EXACT:
            by_text.setdefault((line.verdict.value, general(line)), []).append(line)
    entries = [
        f"- {len(same)} x {verdict}, {', '.join(f'`{name}`' for name in sorted({line.operator for line in same}))}: "
        f"{text}"
        for (verdict, text), same in by_text.items()
    ]
    return "\n## Results that are not exact\n\n" + "\n".join(entries) + "\n" if entries else ""

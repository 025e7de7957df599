"""The page ``docs/evidence/conformance.md``: lines of runs on several rank counts as tables."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from mpi4py import MPI
from mpi4py import __version__ as mpi4py_version

from distconv.jobs.verification.engine.journal import Line, size
from distconv.jobs.verification.engine.layouts import KINDS
from distconv.jobs.verification.engine.verdicts import BAD, Verdict

SHORT = {
    "samples": ("n", "all ranks along the samples"),
    "depth": ("d", "all ranks along the depth (3-D)"),
    "height": ("h", "all ranks along the height (2-D, 3-D)"),
    "width": ("w", "all ranks along the width"),
    "samples + space": ("n·s", "two groups of samples, the other ranks along the first spatial dimension"),
    "two in space": ("s·s", "two ranks along the first spatial dimension, the others along the second"),
    "uneven": ("uneven", "along the first spatial dimension (or the samples), in blocks that grow from perhaps none"),
    "cyclic": ("cyclic", "the same, dealt out in turn by two or one"),
    "empty samples": ("empty n", "one sample: all ranks but one have an empty block"),
    "empty space": ("empty s", "the smallest extent that the operator takes along the first spatial dimension"),
    "nothing split": ("whole", "every rank holds all of every tensor"),
    "replicas": ("r", "the same, on the grid axis for replicas"),
    "replicas + space": ("r·s", "two replicas of tensors that are split along the first spatial dimension"),
    "channels": ("c", "all ranks along the channels, whose number they divide"),
    "ragged channels": ("c ragged", "the same, with a number they do not divide"),
    "empty channels": ("c empty", "fewer channels than ranks"),
    "channels + samples": ("c·n", "two ranks along the channels, the others along the samples"),
    "channels + space": ("c·s", "two ranks along the channels, the others along the first spatial dimension"),
}
"""Heading and meaning of each kind of layout."""

_SIGNS = {
    Verdict.EXACT: "=",
    Verdict.REDISTRIBUTES: "~",
    Verdict.REPLICATES: "r",
    Verdict.RAISES: "!",
    Verdict.REFUSED: "t",
    Verdict.INFINITE: "inf",
    Verdict.OTHER_WORDS: "t",
    Verdict.WRONG: "WRONG",
    Verdict.UNCLEAR: "UNCLEAR",
    Verdict.HANGS: "HANGS",
}

BAR = "¦"
"""Character that replaces a vertical bar in a table."""

_WORST = [
    *(Verdict.HANGS, Verdict.WRONG, Verdict.UNCLEAR, Verdict.INFINITE, Verdict.RAISES, Verdict.REPLICATES),
    *(Verdict.REDISTRIBUTES, Verdict.OTHER_WORDS, Verdict.REFUSED, Verdict.EXACT),
]

_PREFACE = """\
# Conformance

<!-- Generated; do not edit.
Command: distconv verify conformance --page docs/evidence/conformance.md --ranks {ranks} -->

Every operator and option of one table, on every kind of grid, against one process: plain torch, float64 unless a row
says otherwise. Compared are all results, the gradients of all inputs and parameters, and the buffers, block by block,
to 1e-10 of the tensor's largest value. `mpiexec -n 4 distconv verify conformance` runs it and ends with exit code 1
if anything is wrong. The last family, `operators`, are the largest samples with which torch tests its own operators and
modules, by every name that torch has for them, all tensors split, modules after `dc.parallelize`; on the first of the
rank counts alone.

{machine}

| sign | meaning |
|---|---|
| `=` | exact, and nothing was redistributed |
| `~` | exact, after redistributions of so many bytes (forward and backward, all ranks; the most of any rank count) |
| `r` | exact, but by no rule: every rank computes the whole, with a `ReplicationWarning`; bytes as above |
| `!` | raises `UnsupportedOperation`, with a way out |
| `t` | torch itself refuses these extents, and distconv, too |
| `inf` | an input has infinities, and NaN is in other places than torch's: zero padding of a block times infinity |
| `WRONG` | differs, or raises on some ranks only |
| `UNCLEAR` | raises anything else, or names no way out |

A number of ranks behind a sign says that only these rank counts come to it; the others do better. Empty: the tensors
have no such dimension, or the row runs on fewer kinds of grids because its messages are another row's.

A message counts as a redistribution if it changes who owns what: a tensor moves from one distribution to another, or
its gradient moves back. The messages that an operator's own rule needs do not count, however large: halo exchanges,
boxes assembled for windows, shares of a sum that go to their owners, and sums over ranks. An operator that assembles
its whole input is `=` here; the bytes of both kinds are in the JSON that `--json` writes.

{layouts}
"""


def page(lines: Sequence[Line]) -> str:
    """Return the page for lines of one or several rank counts."""
    counts = sorted({line.ranks for line in lines})
    preface = _PREFACE.format(
        ranks=",".join(map(str, counts)), machine=machine(), layouts=table(["column", "grid"], _layouts())
    )
    families = dict.fromkeys(line.family for line in lines)
    parts = [preface, _totals(lines, counts)]
    parts += [_family(family, [line for line in lines if line.family == family], counts) for family in families]
    return "\n".join(parts)


def machine() -> str:
    """Return the versions and the architecture that a page was made with."""
    name, version = MPI.get_vendor()
    mpi = f"{name} {'.'.join(map(str, version))}"
    python = f"Python {platform.python_version()}"
    return f"torch {torch.__version__}, {mpi}, mpi4py {mpi4py_version}, {python}, {platform.machine()}, no GPU."


def _layouts() -> list[tuple[str, str]]:
    return [SHORT[kind] for kind in KINDS]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Parameters
    ----------
    heads : sequence of str
        Column headers.
    rows : iterable of sequence of str
        Cells of each row.

    Returns
    -------
    str
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _totals(lines: Sequence[Line], counts: Sequence[int]) -> str:
    rows = []
    for ranks in counts:
        own = [line for line in lines if line.ranks == ranks]
        verdicts = Counter(line.verdict for line in own)
        operators = len({line.operator for line in own})
        moved = size(sum(line.moved_bytes for line in own))
        rows.append([str(ranks), str(operators), str(len(own)), *(str(verdicts[v]) for v in _WORST[::-1]), moved])
    heads = ["ranks", "operators", "cases", *(verdict.value for verdict in _WORST[::-1]), "redistributed"]
    return "## Totals\n\n" + table(heads, rows)


def _family(family: str, lines: Sequence[Line], counts: Sequence[int]) -> str:
    kinds = [kind for kind in KINDS if any(line.layout == kind for line in lines)]
    rows = []
    for (operator, option), own in groupby(_sorted(lines), lambda line: (line.operator, line.option)):
        by_kind: dict[str, list[Line]] = {}
        for line in own:
            by_kind.setdefault(line.layout, []).append(line)
        # A bar would end the cell.
        names = [f"`{operator}`".replace("|", BAR), option.replace("|", BAR)]
        rows.append([*names, *(_cell(by_kind.get(kind, [])) for kind in kinds)])
    heads = ["operator", "option", *(SHORT[kind][0] for kind in kinds)]
    return f"## {family}\n\n{table(heads, rows)}" + _messages(lines)


def _sorted(lines: Sequence[Line]) -> list[Line]:
    """Group the lines of each row, in the order of the table."""
    order = {key: number for number, key in enumerate(dict.fromkeys((line.operator, line.option) for line in lines))}
    return sorted(lines, key=lambda line: order[line.operator, line.option])


def _cell(same: Sequence[Line]) -> str:
    """Return the worst verdict of one row on one kind of layout, over all rank counts."""
    if not same:
        return ""
    worst = min((line.verdict for line in same), key=_WORST.index)
    having = [line for line in same if line.verdict is worst]
    sign = _SIGNS[worst]
    if worst in (Verdict.REDISTRIBUTES, Verdict.REPLICATES):
        sign = f"{sign} {size(max(line.moved_bytes for line in having))}"
    return sign if len(having) == len(same) else f"{sign} ({', '.join(str(line.ranks) for line in having)})"


def _messages(lines: Sequence[Line]) -> str:
    """Return each message once, with its count and the first row that has it."""
    by_text: dict[str, list[Line]] = {}
    for line in lines:
        if line.verdict in (Verdict.RAISES, Verdict.INFINITE) or line.verdict in BAD:
            by_text.setdefault(general(line), []).append(line)
    if not by_text:
        return ""
    told = [
        f"- {len(same)} x {_SIGNS[same[0].verdict]}, first `{same[0].operator}` {same[0].option} over "
        f"{same[0].grid}: {text}"
        for text, same in by_text.items()
    ]
    return "\n" + "\n".join(told) + "\n"


def general(line: Line) -> str:
    """Return the message without the parts that differ between grids."""
    text = re.sub(r"Distribution\(\(.*?\) over [^)]*\)", "Distribution(...)", line.outcome_text)
    return re.sub(r"\d+", "N", text) if line.verdict is Verdict.RAISES else text

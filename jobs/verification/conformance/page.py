"""The page ``docs/evidence/conformance.md`` and its data file, from the lines of runs on several rank counts."""

from __future__ import annotations

import csv
import io
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from mpi4py import MPI
from mpi4py import __version__ as mpi4py_version

from distconv.jobs.verification.engine.journal import Line, size
from distconv.jobs.verification.engine.layouts import CHANNELS_LAST, KINDS
from distconv.jobs.verification.engine.verdicts import BAD, Verdict

# The columns of the data file have the short names: other names would change its format.
SHORT = {
    "samples": ("n", "all ranks along the samples"),
    "depth": ("d", "all ranks along the depth (3-D)"),
    "height": ("h", "all ranks along the height (2-D, 3-D)"),
    "width": ("w", "all ranks along the width"),
    "samples + space": ("n·s", "two groups of samples, the other ranks along the first spatial dimension"),
    "two in space": ("s·s", "two ranks along the first spatial dimension, the others along the second"),
    "uneven": ("uneven", "first spatial dimension (or samples) in blocks of increasing size, the first perhaps empty"),
    "cyclic": ("cyclic", "first spatial dimension (or samples) in cyclic blocks of two indices or one"),
    "empty samples": ("empty n", "one sample: all ranks but one have an empty block"),
    "empty space": ("empty s", "the smallest size that the operator accepts along the first spatial dimension"),
    "nothing split": ("whole", "every tensor is replicated on all ranks, which are along the samples"),
    "replicas": ("r", "every tensor is replicated on all ranks, which are along the grid axis for replicas"),
    "replicas + space": ("r·s", "two replicas of tensors that are split along the first spatial dimension"),
    "channels": ("c", "all ranks along the channels, whose number they divide"),
    "ragged channels": (
        "c ragged",
        "all ranks along the channels, whose number they do not divide",
    ),
    "empty channels": ("c empty", "all ranks along the channels, of which there are fewer than ranks"),
    "channels + samples": ("c·n", "two ranks along the channels, the others along the samples"),
    "channels + space": ("c·s", "two ranks along the channels, the others along the first spatial dimension"),
    CHANNELS_LAST: ("last", "channels_last inputs, split along the first of several spatial dimensions"),
}
"""Heading and meaning of each kind of layout."""

# A cell of the tables shows the worst verdict of all rank counts.
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

_WORST_FIRST = [
    *(Verdict.HANGS, Verdict.WRONG, Verdict.UNCLEAR, Verdict.INFINITE, Verdict.RAISES, Verdict.REPLICATES),
    *(Verdict.REDISTRIBUTES, Verdict.OTHER_WORDS, Verdict.REFUSED, Verdict.EXACT),
]

_PREFACE = """\
# Conformance

<!-- Generated; do not edit.
Command: distconv verify conformance --page docs/evidence/conformance.md --ranks {ranks} -->

Each operator and option is computed on every kind of grid and in one process with plain torch, in float64 unless a row
says otherwise. All results, the gradients of all inputs and parameters, and the buffers are compared block by block.
The tolerance is 1e-10 of the largest value of the tensor. The family `operators` has the largest samples with which
torch tests its own operators and modules, on the first of the rank counts alone.

`mpiexec -n 4 distconv verify conformance` runs the comparison. Its exit code is 1 if anything is wrong. The results of
all rows are in `docs/evidence/{data}`. The [support matrix](../reference/support-matrix.md) summarizes them by operator
family and axis.

Environment: {machine}

"""

_LEGEND = """\
## Families

Number of cases, each a row on one kind of grid, by their worst result over all rank counts:

{families}
| result | meaning |
|---|---|
| `=` | exact, and nothing was redistributed |
| `~` | exact, after redistributions; the data file has their bytes |
| `r` | exact, computed replicated with a `ReplicationWarning` |
| `!` | raises `UnsupportedOperation` with a suggested fix |
| `t` | torch rejects these sizes, and so does distconv |
| `inf` | an input has infinities, and NaN is at other positions than torch's |
| `WRONG` | differs in values or memory format, or raises on some ranks only |
| `UNCLEAR` | raises any other error, or one without a suggested fix |
| `HANGS` | did not end |

A message counts as a redistribution if a tensor moves from one distribution to another, or its gradient moves back.
Halo exchanges, gathered input regions, reduce-scatters and all-reduces do not count.

## Grids

{layouts}
The data file has a column for each kind of grid. A number of ranks after a result says that only these rank counts have
it. A cell is empty if the tensors have no such dimension, or the row runs on fewer kinds of grids.
"""


def page(lines: Sequence[Line], data_name: str) -> str:
    """Return the page for lines of one or several rank counts.

    Parameters
    ----------
    lines : sequence of Line
    data_name : str
        Name of the file with the results of all rows.

    Returns
    -------
    str
    """
    counts = sorted({line.ranks for line in lines})
    preface = _PREFACE.format(ranks=",".join(map(str, counts)), machine=machine(), data=data_name)
    grids = table(["column", "grid"], [SHORT[kind] for kind in KINDS])
    legend = _LEGEND.format(families=_family_table(lines), layouts=grids)
    return "\n".join([preface + _totals(lines, counts), legend, _messages(lines)])


def data_rows(lines: Sequence[Line]) -> list[dict[str, str]]:
    """Return the results of each row by kind of grid.

    Parameters
    ----------
    lines : sequence of Line

    Returns
    -------
    list of dict
        The columns ``family``, ``operator``, ``option`` and one for each kind of grid, by its short name.
    """
    rows: dict[tuple[str, str, str], dict[str, list[Line]]] = {}
    for line in lines:
        rows.setdefault((line.family, line.operator, line.option), {}).setdefault(line.layout, []).append(line)
    return [
        {
            **dict(zip(("family", "operator", "option"), names, strict=True)),
            **{SHORT[kind][0]: _cell(by_kind.get(kind, [])) for kind in KINDS},
        }
        for names, by_kind in rows.items()
    ]


def data(lines: Sequence[Line]) -> str:
    """Return :func:`data_rows` as CSV."""
    text = io.StringIO()
    rows = data_rows(lines)
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _family_table(lines: Sequence[Line]) -> str:
    """Return the number of cells with each sign, for each family."""
    signs = list(dict.fromkeys(_SIGNS.values()))
    counts: dict[str, Counter[str]] = {}
    for row in data_rows(lines):
        cells = (row[SHORT[kind][0]] for kind in KINDS)
        counts.setdefault(row["family"], Counter()).update(cell.split()[0] for cell in cells if cell)
    rows = [[family, *(str(found[sign]) for sign in signs)] for family, found in counts.items()]
    return table(["family", *(f"`{sign}`" for sign in signs)], rows)


def machine() -> str:
    """Return the versions and the architecture that a page was made with."""
    name, version = MPI.get_vendor()
    mpi = f"{name} {'.'.join(map(str, version))}"
    python = f"Python {platform.python_version()}"
    return f"torch {torch.__version__}, {mpi}, mpi4py {mpi4py_version}, {python}, {platform.machine()}, no GPU."


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
        rows.append([str(ranks), str(operators), str(len(own)), *(str(verdicts[v]) for v in _WORST_FIRST[::-1]), moved])
    heads = ["ranks", "operators", "cases", *(verdict.value for verdict in _WORST_FIRST[::-1]), "redistributed"]
    return "## Totals\n\n" + table(heads, rows)


def _cell(same: Sequence[Line]) -> str:
    """Return the worst verdict of one row on one kind of layout, over all rank counts."""
    if not same:
        return ""
    worst = min((line.verdict for line in same), key=_WORST_FIRST.index)
    having = [line for line in same if line.verdict is worst]
    # Rank counts are listed only if others have a better verdict.
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
    items = [
        f"- {len(same)} x {_SIGNS[same[0].verdict]}, first `{same[0].operator}` {same[0].option} over "
        f"{same[0].grid}: {text}"
        for text, same in by_text.items()
    ]
    return "## Messages\n\n" + "\n".join(items) + "\n"


def general(line: Line) -> str:
    """Return the message without the parts that differ between grids.

    Numbers are replaced in messages of unsupported operations only: in other messages, they are the finding.
    """
    text = re.sub(r"Distribution\(\(.*?\) over [^)]*\)", "Distribution(...)", line.outcome_text)
    return re.sub(r"\d+", "N", text) if line.verdict is Verdict.RAISES else text

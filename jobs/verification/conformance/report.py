"""What a run found, as text, JSON, and totals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distconv.jobs.verification.conformance.runner import Line, Verdict
from distconv.whole_files import write_file


def described(lines: Sequence[Line]) -> list[str]:
    """The lines of one case: one text line for each kind of result, with the layouts that came to it."""
    by_verdict: dict[Verdict, list[Line]] = {}
    for line in lines:
        by_verdict.setdefault(line.verdict, []).append(line)
    name = f"{lines[0].operator} {lines[0].option}".strip()
    return [
        f"{verdict.value:<14} {name}: {_layouts(alike, len(by_verdict) == 1)}" for verdict, alike in by_verdict.items()
    ]


def _layouts(alike: Sequence[Line], everywhere: bool) -> str:
    verdict = alike[0].verdict
    if verdict is Verdict.EXACT:
        names = f"all {len(alike)} layouts" if everywhere else ", ".join(line.layout for line in alike)
        halo = max(line.halo_bytes for line in alike)
        return names + (f" (halo up to {size(halo)})" if halo else "")
    if verdict in (Verdict.REDISTRIBUTES, Verdict.REPLICATES):
        return ", ".join(f"{line.layout} ({size(line.moved_bytes)})" for line in alike)
    texts = {line.text.splitlines()[0] if line.text else "": line for line in reversed(alike)}
    shown = f"{', '.join(line.layout for line in alike)}: {alike[0].text}"
    if verdict is Verdict.WRONG and len(texts) > 1:
        return "; ".join(f"{line.layout} ({line.grid}): {line.text}" for line in alike)
    return shown


def size(count: int) -> str:
    """Bytes for people.

    >>> size(900), size(12_400)
    ('900 B', '12.4 kB')
    """
    return f"{count} B" if count < 1000 else f"{count / 1000:.1f} kB"


def totals(lines: Sequence[Line]) -> str:
    """Counts of operators, cases and results."""
    counts = Counter(line.verdict for line in lines)
    operators = len({line.operator for line in lines})
    moved = sum(line.moved_bytes for line in lines)
    results = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    return f"{operators} operators, {len(lines)} cases: {results} ({size(moved)} redistributed)"


def write_json(path: str | Path, lines: Sequence[Line]) -> None:
    """Every line as an object."""
    write_file(path, json.dumps([plain(line) for line in lines], indent=0) + "\n")


def read_json(path: str | Path) -> list[Line]:
    """The lines that :func:`write_json` wrote."""
    return [line(entry) for entry in json.loads(Path(path).read_text())]


def line(entry: Mapping[str, Any]) -> Line:
    """What :func:`plain` made an object of."""
    return Line(**{**entry, "verdict": Verdict(entry["verdict"])})


def plain(line: Line) -> dict[str, Any]:
    """The line as JSON takes it."""
    return {**asdict(line), "verdict": line.verdict.value}

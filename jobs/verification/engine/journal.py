"""Results of cases: a line for each layout, as string and JSON, totals, and a journal that outlives its job."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distconv.jobs.verification.engine.verdicts import EXACT, Verdict
from distconv.whole_files import Folder, write_file


@dataclass(frozen=True)
class Line:
    """Result of one case on one layout. Bytes are summed over all ranks, forward and backward."""

    family: str
    operator: str
    option: str
    layout: str
    grid: str
    ranks: int
    verdict: Verdict
    text: str = ""
    """The message of an exception, or what is wrong."""
    moved_bytes: int = 0
    """Messages that change a distribution (redistributions and their adjoints)."""
    halo_bytes: int = 0
    """All other messages (halo exchanges, gathered input regions, partial sums, and their adjoints)."""
    reduced_bytes: int = 0
    """Buffers handed to allreduces."""

    @property
    def outcome_text(self) -> str:
        """Return the first line of ``text``."""
        return self.text.splitlines()[0] if self.text else ""


def describe_lines(lines: Sequence[Line]) -> list[str]:
    """Return lines that describe a few cases of one operator: one per kind of result, with the layouts that have it."""
    options = dict.fromkeys(line.option for line in lines)
    name = f"{lines[0].operator} {lines[0].option if len(options) == 1 else f'x {len(lines)}'}".strip()
    same_verdict = {verdict: [line for line in lines if line.verdict is verdict] for verdict in Verdict}
    return [
        f"{verdict.value:<14} {name}: {_where(lines_of, len(lines_of) == len(lines), len(options) == 1)}"
        for verdict, lines_of in same_verdict.items()
        if lines_of
    ]


def _where(same_verdict: Sequence[Line], everywhere: bool, one_option: bool) -> str:
    verdict, first = same_verdict[0].verdict, same_verdict[0]
    if verdict in EXACT:
        halo, moved = max(line.halo_bytes for line in same_verdict), max(line.moved_bytes for line in same_verdict)
        if not one_option:
            return f"{len(same_verdict)}" + (f" ({size(moved)})" if moved else "")
        if verdict is not Verdict.EXACT:
            return ", ".join(f"{line.layout} ({size(line.moved_bytes)})" for line in same_verdict)
        names = f"all {len(same_verdict)} layouts" if everywhere else ", ".join(line.layout for line in same_verdict)
        return names + (f" (halo up to {size(halo)})" if halo else "")
    if one_option and verdict is Verdict.WRONG and len({line.outcome_text for line in same_verdict}) > 1:
        return "; ".join(f"{line.layout} ({line.grid}): {line.text}" for line in same_verdict)
    where = ", ".join(line.layout for line in same_verdict) if one_option else f"{first.option}, {first.layout}"
    return f"{where}: {first.text}"


def size(count: int) -> str:
    """Return a number of bytes with its unit.

    >>> size(900), size(12_400)
    ('900 B', '12.4 kB')
    """
    return f"{count} B" if count < 1000 else f"{count / 1000:.1f} kB"


def totals(lines: Sequence[Line]) -> str:
    """Return a line with the numbers of operators, cases and results."""
    counts = Counter(line.verdict for line in lines)
    operators = len({line.operator for line in lines})
    moved = sum(line.moved_bytes for line in lines)
    results = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    return f"{operators} operators, {len(lines)} cases: {results} ({size(moved)} redistributed)"


def write_json(path: str | Path, lines: Iterable[Line]) -> None:
    """Write every line as a JSON object.

    Parameters
    ----------
    path : str or pathlib.Path
    lines : iterable of Line
    """
    write_file(path, json.dumps([plain(line) for line in lines], indent=0) + "\n")


def read_json(path: str | Path) -> list[Line]:
    """Return the lines that :func:`write_json` wrote."""
    return [_line(entry) for entry in json.loads(Path(path).read_text())]


def _line(entry: Mapping[str, Any]) -> Line:
    return Line(**{**entry, "verdict": Verdict(entry["verdict"])})


def plain(line: Line) -> dict[str, Any]:
    """Return the line as an object that JSON can represent."""
    return {**asdict(line), "verdict": line.verdict.value}


class Key(NamedTuple):
    """A case in a journal."""

    family: str
    ranks: int
    operator: str
    option: str


class Journal:
    """Lines as they come, in a file if there is one: which cases have begun, and their results.

    A job that hangs or ends loses one case: the next one resumes after it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self.lines = path, list[Line]()
        self.begun = dict[Key, bool]()
        """Each case that has begun, and whether it has ended."""
        for entry in map(json.loads, path.read_text().splitlines() if path and path.exists() else []):
            self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        key = Key(*(entry[name] for name in Key._fields))
        self.begun[key] = "lines" in entry
        self.lines += [_line(each) for each in entry.get("lines", ())]

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        # Opened and closed for each entry, so that a killed job loses none.
        if self._path is not None:
            with Folder(self._path.parent) as folder, folder.open_append(self._path.name) as lines:
                lines.write(json.dumps(entry) + "\n")

    def begin(self, key: Key) -> None:
        """Record that a case begins."""
        self._note(key._asdict())

    def end(self, lines: Sequence[Line]) -> None:
        """Record ``lines`` as the results of the case that began last."""
        self._note(list(self.begun)[-1]._asdict() | {"lines": [plain(line) for line in lines]})

    def end_with_a_hang(self) -> bool:
        """Record a hang for the case at which a job ended; return True if there is one."""
        if all(self.begun.values()):
            return False
        family, ranks, operator, option = list(self.begun)[-1]
        text = "the job hung or ended here"
        self.end([Line(family, operator, option, "", "", ranks, Verdict.HANGS, text)])
        return True

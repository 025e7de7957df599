"""Result files: one per rank, one JSON object per line, written at once so that a killed rank leaves what it knew.

Lines in order: ``{"begin": test}`` before a test, ``{"test", "outcome", "time_s", "text", "exempt"}`` after it, and
``{"end": true}`` last of all. Outcomes: passed, failed, skipped, and ``elsewhere`` for a test that is meant for other
rank counts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

OUTCOMES = ("passed", "skipped", "failed")


@dataclass
class Record:
    """Result of a test on one rank. ``exempt``: it may be skipped at every rank count (no GPU, no sample data)."""

    test: str
    outcome: str
    time_s: float = 0.0
    text: str = ""
    exempt: bool = False


@dataclass
class RankFile:
    """The content of one rank's file; ``complete`` if that rank came to its end."""

    complete: bool = False
    begun: list[str] = field(default_factory=list)
    records: dict[str, Record] = field(default_factory=dict)


class Writer:
    """Appends lines to one rank's file; without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1) if path else None

    def begin(self, test: str) -> None:
        self._line({"begin": test})

    def record(self, record: Record) -> None:
        self._line(asdict(record))

    def end(self) -> None:
        self._line({"end": True})

    def _line(self, content: dict[str, object]) -> None:
        if self._file:
            self._file.write(json.dumps(content) + "\n")


def rank_path(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` writes its results."""
    return folder / f"rank{rank}.jsonl"


def read(path: Path) -> RankFile:
    """Read one rank's file; an absent file and a line cut short by a kill are an incomplete one."""
    content = RankFile()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        if "end" in entry:
            content.complete = True
        elif "begin" in entry:
            content.begun.append(entry["begin"])
        else:
            record = Record(**entry)
            earlier = content.records.get(record.test)
            # A test may leave several lines (it failed; why the job had to end): the last failure stands.
            if earlier is None or earlier.outcome != "failed" or record.outcome == "failed":
                content.records[record.test] = record
    return content

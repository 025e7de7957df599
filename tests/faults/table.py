"""Prints what came of each case: ``python tests/faults/table.py FOLDER``, the folder that ``run.py --results`` kept."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.faults.cases import CASES, carriers  # noqa: E402
from tests.harness import records  # noqa: E402


def outcomes(folder: Path) -> dict[int, Counter[str]]:
    """How often the tests of each case passed, failed or were skipped, over all ranks and rank counts."""
    found = {number: Counter[str]() for number in CASES}
    by_test = carriers()
    for path in folder.rglob("rank*.jsonl"):
        for record in records.read(path).records.values():
            for number in by_test.get(record.test.split("[")[0], ()):
                found[number][record.outcome] += 1
    return found


def verdict(counts: Counter[str]) -> str:
    """One word for a case."""
    if counts["failed"]:
        return "FAILED"
    if counts["passed"]:
        return "passed"
    return "skipped" if counts["skipped"] else "not run"


def main(folder: Path) -> int:
    """Print a line for each case; 1 if a case failed."""
    verdicts = {number: verdict(counts) for number, counts in outcomes(folder).items()}
    for number, text in verdicts.items():
        print(f"{number:>3}  {text:<8} {CASES[number]}")
    print(", ".join(f"{count} {word}" for word, count in Counter(verdicts.values()).items()))
    return int("FAILED" in verdicts.values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Which form of ``distconv verify`` finds which planted fault: ``python -m tests.jobs.verification.planted_faults``.

``planted_faults.txt`` lists them; each is planted alone in a copy of the checkout. What is run then is quick: operators
of the table and the first samples of torch that stand behind the fault in parentheses, and the first random draws.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.mutation.running import copy_of, replaced

ROOT = Path(__file__).resolve().parents[3]


class Fault(NamedTuple):
    """A change of one module that makes results wrong; ``old`` occurs in the module once."""

    path: str
    words: str
    old: str
    new: str


def read_faults(text: str) -> list[Fault]:
    """Read the faults of ``planted_faults.txt``."""
    found = []
    for part in text.split("\n### ")[1:]:
        head, _, body = part.partition("\n")
        path, _, words = head.partition(": ")
        old, _, new = body.partition("\n--->\n")
        found.append(Fault(path, words, old, new.strip("\n")))
    return found


FAULTS = read_faults(Path(__file__).with_suffix(".txt").read_text())

RUNS = {
    "conformance": "conformance --ranks 2 --operator {both}",
    "torch's samples": "conformance --family torch-samples --ranks 2 --samples 3 --operator {samples}",
    "differential": "differential --ranks 2 --cases 80 --seed 0 --only operators",
}
"""Commands behind ``distconv verify``."""


def names_of(fault: Fault) -> list[str]:
    """Operators that are checked: those in parentheses, of which only ``in place`` has two words."""
    named = re.search(r"\((.*)\)$", fault.words)
    assert named, fault.words
    return ["in place"] if named[1] == "in place" else named[1].split()


def known_to(copy: Path) -> dict[str, set[str]]:
    """Names that the table has, and that torch's samples have."""
    code = (
        "import json; from distconv.jobs.verification.conformance.families import TABLE;"
        "from distconv.jobs.verification.conformance import samples;"
        "print(json.dumps([[c.operator for cs in TABLE.values() for c in cs], samples.names()]))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=copy, env=environment(copy), capture_output=True, text=True)
    table, samples = json.loads(told.stdout)
    return {"both": {*table, *samples}, "samples": set(samples)}


def environment(copy: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def found_by(copy: Path, fault: Fault, run: str, known: dict[str, set[str]]) -> bool | None:
    """Whether a run says that something is wrong or hangs; None where it has nothing of what is checked."""
    chosen = {source: [name for name in names_of(fault) if name in names] for source, names in known.items()}
    words: list[str] = []
    for word in RUNS[run].split():
        if word.startswith("{"):
            if not (named := chosen[word.strip("{}")]):
                return None
            words += named
        else:
            words.append(word)
    module = copy / fault.path
    text = module.read_text()
    assert text.count(fault.old) == 1, f"{fault.path}: the old text occurs {text.count(fault.old)} times"
    with replaced(module, text.replace(fault.old, fault.new)):
        command = [sys.executable, "-m", "distconv", "verify", *words]
        ended = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return ended.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--only", default="", help="faults whose line has these words")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as place:
        copy = copy_of(options.root, Path(place))
        known = known_to(copy)
        for fault in FAULTS:
            if options.only not in f"{fault.path}: {fault.words}":
                continue
            found = {run: found_by(copy, fault, run, known) for run in RUNS}
            missed += not any(found.values())
            told = ", ".join(
                f"{run} {'finds it' if hit else 'has none' if hit is None else 'does not'}"
                for run, hit in found.items()
            )
            print(f"{fault.path}: {fault.words}\n    {told}", flush=True)
    print(f"{len(FAULTS)} faults, {missed} missed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Draw random mutations of the code, run the tests on each in a copy of the checkout, and report the survivors.

    python -m tests.mutation --seed 3 --count 100       of all modules, weighted by their lines
    python -m tests.mutation --folder layers/nn         of the modules whose path begins so
    python -m tests.mutation --since main               of the lines changed since a git revision
    python -m tests.mutation --list                     the mutations alone
    python -m tests.mutation --only 17                  number 17 of the same draw

Each mutation runs the doctests of its module, the tests of the file that mirrors the module, and then the short run of
the other files of its folder, until one fails. A failure, or a stage that reaches the time limit, counts as noticed if
the same tests pass without the mutation in half of the limit; otherwise the outcome is unclear.

An interrupted run continues with the same arguments and its journal. You judge the survivors: those that cannot
change a result go into a file of lines "NUMBER REASON", and the same command with ``--equivalent FILE`` reports again.

Neither mutmut 3.8 nor cosmic-ray 8.7 fits. mutmut runs pytest inside its own processes, so it cannot start mpiexec.
cosmic-ray has one test command per session, no sampling, no mutations of statements, arguments, defaults, returned
values, axes or dtypes (further ones need an installed plug-in), and a time limit does not end jobs of other sessions.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutation import drawing, running
from tests.mutation.drawing import Mutation
from tests.mutation.running import Finding

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("doctests", "mirror", "folder")
COLUMNS = (*STAGES, "survived", "equivalent", "unclear")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, help="number of mutations (default: %(default)s)")
    parser.add_argument("--folder", default="", help="beginning of the paths of the modules")
    parser.add_argument("--since", metavar="REV", help="only lines that differ from a git revision")
    parser.add_argument("--list", action="store_true", help="print the mutations and run no tests")
    parser.add_argument("--only", type=int, metavar="N", help="run mutation N again")
    parser.add_argument("--minutes", type=float, default=30, help="time limit of each stage (default: %(default)s)")
    parser.add_argument("--journal", type=Path, help="file of outcomes to continue (default: a new temporary file)")
    parser.add_argument("--equivalent", type=Path, metavar="FILE", help="judged survivors: lines NUMBER REASON")
    options = parser.parse_args(arguments)
    judged = read_judgements(options.equivalent.read_text()) if options.equivalent else {}
    modules = drawing.modules_of(root, options.folder)
    since = drawing.changed_lines(root, options.since) if options.since else None
    drawn = drawing.draw(modules, options.seed, options.count, since)
    wanted = [mutation for mutation in drawn if options.only in (None, mutation.number)]
    if not wanted:
        parser.error("no mutation to draw there")
    if options.list:
        print(*(f"{mutation}\n{mutation.diff}\n" for mutation in wanted), sep="\n")
        return 0
    journal = (
        options.journal or Path(tempfile.gettempdir()) / f"distconv-mutation-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    )
    findings = read_journal(journal, drawn)
    print(f"journal: {journal}", flush=True)
    with tempfile.TemporaryDirectory(prefix="distconv-mutation-") as place:
        copy = running.copy_of(root, Path(place))
        for mutation in wanted:
            if mutation.number not in findings or options.only:
                print(f"{mutation}\n{short(mutation)}", flush=True)
                finding = findings[mutation.number] = running.try_out(copy, mutation, 60 * options.minutes)
                with journal.open("a") as file:
                    record = {"number": mutation.number, "diff": mutation.diff, **finding._asdict()}
                    print(json.dumps(record), file=file)
                print(f"    {finding.outcome:8} {finding.seconds:5.0f} s  {finding.reason}", flush=True)
    pairs = [(mutation, judge(findings[mutation.number], judged.get(mutation.number))) for mutation in wanted]
    print(*report(pairs), sep="\n")
    return int(any(finding.outcome == "survived" for _, finding in pairs))


def short(mutation: Mutation) -> str:
    """Return the lines that a mutation removes and adds."""
    return "\n".join(f"    {line}" for line in mutation.diff.splitlines()[3:] if re.match(r"[-+]\s*\S", line))


def read_journal(journal: Path, drawn: Sequence[Mutation]) -> dict[int, Finding]:
    """Return the findings of earlier runs, after a check that they belong to the same draw."""
    findings = {}
    diffs = {mutation.number: mutation.diff for mutation in drawn}
    for line in journal.read_text().splitlines() if journal.exists() else ():
        record = json.loads(line)
        if diffs.get(record["number"]) != record["diff"]:
            raise SystemExit(f"{journal}: mutation {record['number']} is not the one drawn now. Use another journal.")
        findings[record["number"]] = Finding(*(record[name] for name in Finding._fields))
    return findings


def read_judgements(text: str) -> dict[int, str]:
    """Read lines of a number and a reason."""
    found = [re.fullmatch(r"\s*(\d+)[\s,:]+(\S.*)", line) for line in text.splitlines() if line.strip()]
    if None in found:
        raise SystemExit("a judgement is a line NUMBER REASON")
    return {int(line[1]): line[2] for line in found if line}


def judge(finding: Finding, reason: str | None) -> Finding:
    """Return an equivalent survivor as such. Mutations that a test noticed stay noticed."""
    return Finding("equivalent", reason) if reason and finding.outcome == "survived" else finding


def report(pairs: Sequence[tuple[Mutation, Finding]]) -> Iterator[str]:
    """Yield the outcomes by area and by kind, then each mutation that no test noticed."""
    titles = " ".join(f"{title:>10}" for title in ("drawn", *COLUMNS, "noticed", "by time"))
    for title, group in (
        ("area", lambda mutation: mutation.path.split("/")[0]),
        ("kind", lambda mutation: mutation.kind),
    ):
        rows: dict[str, list[Finding]] = {}
        for mutation, finding in sorted(pairs, key=lambda pair: group(pair[0])):
            rows.setdefault(group(mutation), []).append(finding)
        yield f"\n{title:16}{titles}"
        yield from (row(name, found) for name, found in rows.items())
        yield row("all", [finding for _, finding in pairs])
    for mutation, finding in pairs:
        if finding.outcome not in STAGES:
            reason = f": {finding.reason}" if finding.reason else ""
            yield f"\n{mutation}, {finding.outcome}{reason}\n{mutation.diff}"


def row(name: str, found: Sequence[Finding]) -> str:
    """Return a line of the table. The percentage leaves equivalent and unclear mutations out."""
    counts = {column: sum(finding.outcome == column for finding in found) for column in COLUMNS}
    noticed = sum(counts[stage] for stage in STAGES)
    judged = noticed + counts["survived"]
    by_time = sum(finding.outcome in STAGES and finding.reason.startswith("time") for finding in found)
    cells = (len(found), *counts.values(), f"{100 * noticed / judged:.0f}%" if judged else "-", by_time)
    return f"{name:16}" + " ".join(f"{cell:>10}" for cell in cells)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that jobs end and the copy goes
    sys.exit(main())

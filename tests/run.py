"""Run the tests, serially and under mpiexec on several rank counts, and print one table.

    python tests/run.py                                           tests that are not long, four cases of each on ranks
    python tests/run.py --full                                    everything but what is marked slow
    python tests/run.py --rest                                    what the first leaves out of the second
    python tests/run.py --ranks 2,4 tests/distconv/test_grid.py -k name
    python tests/run.py layers/nn jobs/mesh/scores.py             what mirrors a folder or a module
    python tests/run.py --ranks 4 -m slow                         the slow ones, which are left out without -m
    python tests/run.py --slowest 20                              and where the time went

In the first three, each case of a test that names no rank counts runs on one of them. All other arguments go to pytest;
paths are relative to the root of the checkout. A job that had to stop goes on in a new one behind the test that stopped
it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from tests.harness import launch, records, selection  # noqa: E402
from tests.harness.rank import log_path  # noqa: E402

SERIAL = 0
SHORT_COUNTS = (SERIAL, 2, 3, 4)
COUNTS = (*SHORT_COUNTS, *selection.MANY)
SELECTED_COUNTS = (SERIAL, 1, 2, 3, 4, 6, 8)
"""Rank counts of the short run, of the full run, and where tests are named."""
PACKAGES = ("distconv", "kernels", "layers", "perfmodel", "pipeline", "jobs")
RESTARTS = 3
PARTS, AT_ONCE = 8, 2
PART_NAMES = [f"{part}-of-{PARTS}" for part in range(PARTS)]
JOB_LIMIT_S = 1800.0
LOG_LINES = 40


@dataclass
class Column:
    """Results of one rank count."""

    ranks: int
    tests: dict[str, records.Record] = field(default_factory=dict)
    time_s: float = 0.0

    def count(self, outcome: str) -> int:
        return Counter(record.outcome for record in self.tests.values())[outcome]


def main() -> int:
    options, arguments = parse()
    signal.signal(signal.SIGTERM, end)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="distconv-tests-") as folder:
        place = options.results or Path(folder)
        made = without_ranks(arguments, place) if options.share and SERIAL in options.ranks else {}
        columns = [made.get(ranks) or run(ranks, arguments, place) for ranks in options.ranks]
    print(slowest(columns, options.slowest) if options.slowest else "", end="")
    print(table(columns))
    never = never_run(columns) if options.share in ("rest", "full") and options.ranks == COUNTS else []
    for test in never:
        print(f"never run, at no rank count: {test}")
    passed, failed, skipped = (
        sum(column.count(name) for column in columns) for name in ("passed", "failed", "skipped")
    )
    failed += len(never)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0 if passed or skipped else 5


def end(*_: object) -> None:
    """Take the jobs along: they have sessions of their own, and would go on."""
    for job in list(launch.RUNNING):
        job.kill()
    os._exit(128 + signal.SIGTERM)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=rank_counts, help="e.g. serial,2,4")
    parser.add_argument("--short", dest="share", action="store_const", const="short", help="the default")
    parser.add_argument("--full", dest="share", action="store_const", const="full", help="all that is not marked slow")
    parser.add_argument(
        "--rest", dest="share", action="store_const", const="rest", help="what the short run leaves out"
    )
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="list the N tests that took longest")
    parser.add_argument(
        "--results", type=lambda text: Path(text).resolve(), help="keep each rank's results and log in this folder"
    )
    options, arguments = parser.parse_known_args()
    if not arguments and not options.ranks:
        options.share = options.share or "short"
    if options.share:
        arguments.append(f"--share={options.share}")
        options.ranks = options.ranks or (SHORT_COUNTS if options.share == "short" else COUNTS)
    options.ranks = options.ranks or SELECTED_COUNTS
    arguments = mirrored(arguments)
    if not any(argument.startswith("-m") for argument in arguments):
        arguments += ["-m", "not slow"]
    return options, arguments


def mirrored(arguments: list[str]) -> list[str]:
    """The arguments with folders and modules of the package replaced by their tests; all tests if none are named.

    ``layers/nn`` becomes ``tests/layers/nn`` and ``layers/nn/pooling.py`` becomes ``tests/layers/nn/test_pooling.py``.
    """
    found, named = [], False
    for before, argument in zip(["", *arguments], arguments, strict=False):
        path = Path(argument.split("::")[0])
        if before in ("-k", "-m", "-p") or not path.exists():
            found.append(argument)
            continue
        named = True
        found.append(mirror(path.resolve()) or argument)
    return found if named else [*found, str(ROOT / "tests")]


def mirror(path: Path) -> str | None:
    """Where the tests of a folder or module of the package are; None for any other path."""
    if not any(path.is_relative_to(ROOT / package) for package in PACKAGES):
        return None
    inside = path.relative_to(ROOT)
    tests = ROOT / "tests" / (inside.with_name(f"test_{inside.name}") if path.is_file() else inside)
    if not tests.exists():
        raise SystemExit(f"{inside}: there is no {tests.relative_to(ROOT)}; name the tests that are meant")
    return str(tests)


def rank_counts(text: str) -> tuple[int, ...]:
    """Read ``serial,2,4``."""
    return tuple(SERIAL if part == "serial" else int(part) for part in text.split(","))


def without_ranks(arguments: list[str], folder: Path) -> dict[int, Column]:
    """Run the tests without ranks, and those of one rank, in parts of which two run at once.

    There are more parts than that, so that both cores are idle at about the same time; many tests only wait.
    """
    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = list(pool.map(lambda part: run(SERIAL, [*arguments, f"--part={part}"], folder / part), parts(arguments)))
    tests = {test: record for column in made for test, record in column.tests.items()}
    return {SERIAL: Column(SERIAL, tests, time.monotonic() - started)}


def parts(arguments: list[str]) -> list[str]:
    """Return the names of the parts with a test file in the folders and files that are named; the first if none has."""
    paths = [Path(argument.split("::")[0]) for argument in arguments]
    files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    found = {
        index for file in files if file.is_file() for index in range(PARTS) if selection.in_part(file, index, PARTS)
    }
    return [PART_NAMES[index] for index in sorted(found)] or PART_NAMES[:1]


def run(ranks: int, arguments: list[str], folder: Path) -> Column:
    """Run all tests of one rank count, in as many jobs as it takes."""
    column = Column(ranks)
    begun: set[str] = set()
    started = time.monotonic()
    for attempt in range(1 + RESTARTS):
        again = f", job {attempt + 1}, behind the test that stopped the job" if attempt else ""
        print(f"== {title(ranks)}{again}", flush=True)
        place = folder / f"{title(ranks).replace(' ', '-')}.{attempt}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "done").write_text("\n".join(sorted(begun)))
        code = run_job(ranks, arguments, place)
        files = [records.read(records.rank_path(place, rank)) for rank in range(max(ranks, 1))]
        fresh = {test for file in files for test in file.begun}
        column.tests |= merge(files, code)
        begun |= fresh
        if not stopped(files, code):
            break
        show_logs(place, ranks)
        if not fresh:
            break
    column.time_s = time.monotonic() - started
    show_failures(column)
    return column


def run_job(ranks: int, arguments: list[str], place: Path) -> int:
    """Start one job and return its exit code."""
    command = [str(place), "--only", "ranks" if ranks else "serial", "--done", str(place / "done"), *arguments]
    # One hash seed, so that whatever is ordered by a hash is ordered alike on all ranks.
    # With bytecode, wherever it is switched off: dozens of processes would compile every module again.
    environment = {"PYTHONHASHSEED": "0", "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": ""}
    if any(argument.startswith("--part=") for argument in arguments):
        environment["OMP_NUM_THREADS"] = "1"
    with launch.Job(ranks, ROOT / "tests" / "harness" / "rank.py", *command, env=environment, capture=False) as job:
        try:
            return job.wait(JOB_LIMIT_S).returncode
        except AssertionError as error:
            print(error)
            return 1


def stopped(files: list[records.RankFile], code: int) -> bool:
    return code != 0 or not all(file.complete for file in files)


def merge(files: list[records.RankFile], code: int) -> dict[str, records.Record]:
    """One record per test: failed if it failed on any rank, or if the job stopped in it without a word."""
    merged: dict[str, records.Record] = {}
    for rank, file in enumerate(files):
        for test, record in file.records.items():
            if record.outcome == "failed":
                record.text = f"rank {rank}: {record.text}"
            if test not in merged or (record.outcome == "failed" and merged[test].outcome != "failed"):
                merged[test] = record
    if stopped(files, code) and not any(record.outcome == "failed" for record in merged.values()):
        ended = ", ".join(str(rank) for rank, file in enumerate(files) if not file.complete) or "none"
        text = f"the job ended with exit code {code}; ranks without an end to their results: {ended}"
        open_tests = [test for file in files for test in file.begun if test not in file.records]
        name = open_tests[0] if open_tests else "the job outside of its tests"
        merged[name] = records.Record(name, "failed", text=text)
    return merged


def show_failures(column: Column) -> None:
    for test, record in column.tests.items():
        if record.outcome == "failed":
            print(f"\nFAILED, {title(column.ranks)}: {test}\n{record.text}\n", flush=True)


def show_logs(place: Path, ranks: int) -> None:
    for rank in range(1, ranks):
        path = log_path(place, rank)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        if lines:
            print(f"--- log of rank {rank} (last {LOG_LINES} lines)", *lines[-LOG_LINES:], sep="\n", flush=True)


def never_run(columns: list[Column]) -> list[str]:
    """Tests that no rank count ran, other than those that lack a GPU or the sample data."""
    by_test: dict[str, list[records.Record]] = {}
    for column in columns:
        for test, record in column.tests.items():
            by_test.setdefault(test, []).append(record)
    return [
        f"{test} ({next((record.text for record in all_of if record.text), 'no rank count fits its marker')})"
        for test, all_of in by_test.items()
        if not any(record.outcome in ("passed", "failed") or record.exempt for record in all_of)
    ]


def slowest(columns: list[Column], count: int) -> str:
    """The tests that took longest over all rank counts together, their parameters together: a line each."""
    total: Counter[str] = Counter()
    for column in columns:
        for test, record in column.tests.items():
            total[test.split("[")[0]] += record.time_s
    return "".join(f"{time_s:8.1f} s  {test}\n" for test, time_s in total.most_common(count))


def table(columns: list[Column]) -> str:
    lines = [f"{'':>8} {'passed':>8} {'failed':>8} {'skipped':>8} {'time':>8}"]
    for column in columns:
        numbers = " ".join(f"{column.count(name):>8}" for name in ("passed", "failed", "skipped"))
        lines.append(f"{title(column.ranks):>8} {numbers} {column.time_s:>6.0f} s")
    return "\n".join(lines)


def title(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}" if ranks else "serial"


if __name__ == "__main__":
    sys.exit(main())

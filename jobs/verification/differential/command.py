"""Compare random operators and small networks over grids with plain torch on one process.

Each case is determined by the seed and its index. A wrong case is printed with the command that repeats it. The exit
code is 1 if any case is wrong.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpi4py import MPI

from distconv.jobs.training.options import nonnegative_int, positive_int
from distconv.jobs.verification.differential.runs import KINDS, TIME_LIMIT_S, DifferentialRun, drawn, summary, table
from distconv.jobs.verification.engine import launch
from distconv.jobs.verification.engine.journal import Journal, Line
from distconv.jobs.verification.engine.verdicts import BAD

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv verify differential --cases 500 --seed 0
  distconv verify differential --ranks 1,2,3,4,5,6 --cases 500
  mpiexec -n 3 distconv verify differential --seed 0 --case 17
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv verify differential``."""
    parser.add_argument(
        "--cases", type=positive_int, default=500, metavar="N", help="number of random cases (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=nonnegative_int, default=0, help="seed from which the cases are drawn (default: %(default)s)"
    )
    parser.add_argument("--only", choices=KINDS, default="all", help="kind of the cases (default: %(default)s)")
    parser.add_argument(
        "--case",
        type=nonnegative_int,
        metavar="NUMBER",
        help="run only the case with this index, and print its outcome",
    )
    parser.add_argument(
        "--first",
        type=nonnegative_int,
        default=0,
        metavar="NUMBER",
        help="index of the first case (default: %(default)s)",
    )
    launch.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the requested cases, in this job or in new jobs. Collective over MPI.COMM_WORLD."""
    if options.ranks is None:
        return _here(MPI.COMM_WORLD, options)
    with tempfile.TemporaryDirectory() as folder:
        path = options.journal or Path(folder) / "journal"
        for ranks in options.ranks:
            launch.past_hangs(options.mpiexec, ranks, _arguments(options), path)
        return int(any(line.verdict in BAD for line in Journal(path).lines))


def _arguments(options: argparse.Namespace) -> list[str]:
    asked = {"seed": options.seed, "only": options.only, "cases": options.cases, "first": options.first}
    if options.case is not None:
        asked["case"] = options.case
    return ["verify", "differential", *(word for name, value in asked.items() for word in (f"--{name}", str(value)))]


def _here(comm: MPI.Intracomm, options: argparse.Namespace) -> int:
    single = options.case is not None
    indices = [options.case] if single else range(options.first, options.first + options.cases)
    repeated = f"mpiexec -n {comm.size} distconv verify differential --seed {options.seed}"
    repeated += "" if options.only == "all" else f" --only {options.only}"

    def tell(lines: Sequence[Line]) -> None:
        for line in lines:
            if single or line.verdict in BAD:
                number = line.option.partition(":")[0].removeprefix("case ")
                print(f"{line.verdict.value}: {line.option.partition(':')[0]}: {line.operator}"
                      f"{line.option.partition(':')[2]} on {line.grid}: {line.text}\n  {repeated} --case {number}",
                      flush=True)  # fmt: skip

    lines = launch.run(
        DifferentialRun(comm, TIME_LIMIT_S), drawn(options.seed, options.only, indices), options.journal, tell
    )
    if comm.rank == 0:
        print(table(lines))
        print(f"{comm.size} ranks, seed {options.seed}: {summary(lines)}", flush=True)
    return int(any(line.verdict in BAD for line in lines))

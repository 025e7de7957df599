"""Random differential runs: the distributed operators and whole small networks against one-process torch.

Each case follows from two numbers, the seed and its own; what is wrong is printed with the command that repeats it.
The exit code is 1 if any case is wrong.
"""

from __future__ import annotations

import argparse

from mpi4py import MPI

from distconv.jobs.training.options import natural, positive
from distconv.jobs.verification.differential import launch
from distconv.jobs.verification.differential.runs import KINDS, Run
from distconv.jobs.verification.differential.verdicts import Verdict

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv verify differential --cases 500 --seed 0
  distconv verify differential --ranks 1,2,3,4,5,6 --cases 500
  mpiexec -n 3 distconv verify differential --seed 0 --case 17
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv verify differential``."""
    parser.add_argument("--cases", type=positive, default=500, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="another seed draws other cases (default: %(default)s)")
    parser.add_argument("--only", choices=KINDS, default="all", help="what is drawn (default: %(default)s)")
    parser.add_argument("--case", type=natural, metavar="NUMBER", help="run this one and say what came of it")
    parser.add_argument("--first", type=natural, default=0, metavar="NUMBER", help="first case (default: %(default)s)")
    launch.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Run the cases that were asked for, here or in jobs of their own. Collective over MPI.COMM_WORLD."""
    if options.ranks is None:
        return _run(options)
    codes = [launch.start(options.mpiexec, ranks, _arguments(options)) for ranks in options.ranks]
    return max(codes)


def _arguments(options: argparse.Namespace) -> list[str]:
    asked = {"seed": options.seed, "only": options.only, "cases": options.cases, "first": options.first}
    if options.case is not None:
        asked["case"] = options.case
    return ["verify", "differential", *(word for name, value in asked.items() for word in (f"--{name}", str(value)))]


def _run(options: argparse.Namespace) -> int:
    run = Run(MPI.COMM_WORLD, options.seed, options.only)
    if options.case is not None:
        tally = run.cases([options.case], verbose=True)
    else:
        tally = run.cases(range(options.first, options.first + options.cases))
    if MPI.COMM_WORLD.rank == 0:
        print(tally.table())
        for reason, count in tally.reasons.most_common(20):
            print(f"{count} times {reason}")
        print(f"{MPI.COMM_WORLD.size} ranks, seed {options.seed}: {tally.summary()}", flush=True)
    return 1 if tally.total[Verdict.WRONG] else 0

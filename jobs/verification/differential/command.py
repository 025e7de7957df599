"""Command line of the differential run."""

from __future__ import annotations

import argparse
import sys

from mpi4py import MPI

from distconv.jobs.verification import differential
from distconv.jobs.verification.differential import launch


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 if any case is wrong."""
    options = _parser().parse_args(arguments)
    if options.ranks and MPI.COMM_WORLD.size == 1:
        codes = [_start(int(ranks), options) for ranks in options.ranks.split(",")]
        return 1 if any(codes) else 0
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distconv verify differential",
        description=differential.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=500, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other cases (default: %(default)s)")
    parser.add_argument("--only", choices=["operators", "networks", "all"], default="all", help="what is drawn")
    parser.add_argument("--case", type=int, help="run this one and say what came of it")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: %(default)s)")
    parser.add_argument("--ranks", help="start mpiexec by itself for each of these rank counts, e.g. 1,2,3,4,5,6")
    parser.add_argument("--mpiexec", default=launch.mpiexec(), help="how to start a job (default: %(default)s)")
    return parser


def _start(ranks: int, options: argparse.Namespace) -> int:
    arguments = ["--seed", str(options.seed), "--only", options.only, "--cases", str(options.cases)]
    arguments += ["--first", str(options.first)] if options.case is None else ["--case", str(options.case)]
    return launch.start(options.mpiexec, ranks, "distconv.jobs.verification.differential", arguments)


def _run(options: argparse.Namespace) -> int:
    from distconv.jobs.verification.differential.runs import Run
    from distconv.jobs.verification.differential.verdicts import Verdict

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


if __name__ == "__main__":
    sys.exit(main())

"""Compare the planner's exact search with the paper's selector: predicted times, optimality bound, and search time.

Only the planner runs, so any number of ranks is possible.
"""

from __future__ import annotations

import argparse
import math
import time

from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.jobs.planning.options import (
    add_machine_argument,
    add_network_arguments,
    quantity_parser,
    run_on_rank_0,
    trace_network,
)
from distconv.jobs.planning.strong_scaling import rank_counts
from distconv.jobs.training.options import positive_int
from distconv.perfmodel.cost import block_geometry, operation_work
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.units import Memory
from distconv.perfmodel.strategy.selection import Strategy, select

from . import report

EXAMPLES = """\
examples:
  distconv bench planner --model resnet50 --input 3,224,224 --batch 256 --machine lassen --to 2048
  distconv bench planner --model unet3d --width 32 --input 1,256,256,256 --batch 4 --machine lassen --from 256 \\
      --to 256 --memory 0.68GB
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench planner``."""
    add_network_arguments(parser)
    add_machine_argument(parser, required=True)
    parser.add_argument(
        "--from", dest="least", type=positive_int, default=4, help="smallest number of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--to", dest="most", type=positive_int, default=1024, help="largest number of ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--memory", type=quantity_parser(Memory), help=f"memory limit of each rank: {Memory.kind} (default: none)"
    )
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Plan for ``--from`` to ``--to`` ranks and print: for powers of two, and ``--to``. Collective; rank 0 works.

    Raises
    ------
    DistconvError
        If ``--from`` is more than ``--to``.
    """
    if options.least > options.most:
        raise DistconvError(f"--from {options.least}: larger than --to {options.most}. Swap the values.")
    run_on_rank_0(MPI.COMM_WORLD, lambda: _compare(options))
    return 0


def _compare(options: argparse.Namespace) -> None:
    machine, graph = Machine.load(options.machine), trace_network(options)
    print(
        report.heading(
            f"{options.model}, {len(graph.deciding)} deciding layers, {options.batch} samples of "
            f"{' x '.join(map(str, options.input))}, planned for {machine.name}"
        )
    )
    heads = zip(
        ("plans", "exact ms", "gap", "plan s", "path ms", "plan s", "wins by"), (8, 10, 7, 9, 10, 9, 8), strict=True
    )
    print(" ".join(["ranks".rjust(6), *(head.rjust(width) for head, width in heads)]))
    wins = []
    figures = {}
    for ranks in [count for count in rank_counts(options.most) if count >= options.least]:
        exact, exact_s = _timed(graph, machine, ranks, options.memory, "exact")
        path, path_s = _timed(graph, machine, ranks, options.memory, "longest-path")
        wins.append(path.time / exact.time - 1)
        digits = sum(math.log10(len(options_of)) for options_of in candidates(graph, ranks).values())
        print(
            f"{ranks:>6} {f'10^{digits:.0f}':>8} {exact.time * 1e3:>10.3f} {exact.gap:>7.2%} {exact_s:>9.1f} "
            f"{path.time * 1e3:>10.3f} {path_s:>9.1f} {wins[-1]:>8.2%}",
            flush=True,
        )
        figures[ranks] = {
            "exact_s": exact.time,
            "gap": exact.gap,
            "exact_search_s": exact_s,
            "path_s": path.time,
            "path_search_s": path_s,
        }
    better = [win for win in wins if win > 1e-9]
    print(
        f"exact is faster for {len(better)} of {len(wins)} rank counts, by {max(wins):.2%} at most and "
        f"{sum(wins) / len(wins):.2%} on average; slower for {sum(win < -1e-9 for win in wins)}"
    )
    report.print_json({"ranks": figures}, options.json)


def _timed(
    graph: LayerGraph, machine: Machine, ranks: int, memory: float | None, method: str
) -> tuple[Strategy, float]:
    """Return a strategy and the seconds of its search, with all cost caches empty at its start."""
    graph.caches.clear()
    for cached in (*vars(block_geometry).values(), *vars(operation_work).values()):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    start = time.perf_counter()
    strategy = select(graph, machine, ranks, memory=memory, method=method)
    return strategy, time.perf_counter() - start

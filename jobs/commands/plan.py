"""Choose the distribution of each layer of a network, for the shortest predicted training step that fits into memory.

Prints the distribution of the layers, predicted times (FP, BPx, BPw: compute; BPa: all-reduce of gradients; halo: halos
and channels; sync: reductions that compute waits for; shuffle: redistributions), memory, and a bound on the distance to
the optimum. Compares the plan with data parallelism and spatial parallelism alone. Runs on one rank.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from mpi4py import MPI

from distconv.batch_norm_scope import BATCH_NORM_SCOPES
from distconv.jobs.planning import picture, report
from distconv.jobs.planning.halo_picture import largest_halo
from distconv.jobs.planning.options import (
    add_machine_argument,
    add_network_arguments,
    add_ranks_argument,
    add_step_mode_arguments,
    check_writable,
    choose_rank_count,
    quantity_parser,
    run_on_rank_0,
    step_mode,
    trace_network,
)
from distconv.jobs.planning.strong_scaling import Scaling, rank_counts, select_strategies
from distconv.jobs.training.options import add_shard_weights_argument
from distconv.perfmodel.cost.assumptions import MEMORY_MODELS, Settings
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.units import Memory
from distconv.perfmodel.strategy.selection import AUTO, METHODS, Strategy, select

EXAMPLES = """\
examples:
  distconv plan --model resnet50 --input 3,224,224 --batch 256 --ranks 64 --machine lassen --out plan.json
  distconv plan --model resnet50 --input 3,224,224 --batch 256 --ranks at-most:64 --machine lassen
  distconv plan --model mesh2k --input 18,2048,2048 --batch 4 --ranks 16 --machine lassen --memory 16GB --plot plan.png
  distconv plan --model mesh2k --input 18,2048,2048 --batch 4 --ranks 16 --machine lassen --shard-weights auto
  distconv plan --model mypackage.nets:build --classes 10 --input 1,28,28 --batch 32 --ranks 4 --machine ./mine.yaml
  mpiexec -n 4 distconv train classify --data mnist --model mypackage.nets:build --batch 32 --plan plan.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv plan``."""
    defaults = Settings()
    add_network_arguments(parser)
    add_ranks_argument(parser)
    add_machine_argument(parser, required=True)
    add_step_mode_arguments(parser, "plan")
    parser.add_argument(
        "--memory",
        type=quantity_parser(Memory),
        metavar="16GB",
        help="memory limit of each rank, with its unit (default: the machine's)",
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default=METHODS[0],
        help="search: exact, or the longest-path heuristic of the paper (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer-slots",
        type=int,
        default=defaults.optimizer_slots,
        metavar="N",
        help="optimizer state tensors per parameter: SGD 0, with momentum 1, Adam 2 (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="count the optimizer state as split over the ranks with the same weights, as distconv train "
        "--shard-optimizer does",
    )
    add_shard_weights_argument(parser, "none", AUTO)
    parser.add_argument(
        "--memory-model",
        choices=MEMORY_MODELS,
        default=defaults.memory_model,
        help="activations that are kept until backward: those that autograd saves, or all outputs and activation "
        "gradients (default: %(default)s)",
    )
    parser.add_argument(
        "--workspace",
        type=quantity_parser(Memory),
        default=defaults.workspace,
        metavar="1GB",
        help="memory of each rank for the workspace of convolutions, with its unit (default: none)",
    )
    parser.add_argument(
        "--batch-norm",
        choices=BATCH_NORM_SCOPES,
        default=defaults.batch_norm,
        help="ranks that share the statistics of batch norm; stored in the plan, and training follows it "
        "(default: %(default)s)",
    )
    parser.add_argument("--layers", action="store_true", help="print the times of each layer, too")
    parser.add_argument("--out", type=Path, metavar="PLAN.json", help="write the plan to this file")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the plan, and its scaling up to --ranks, into this file (.png, .pdf, .svg)",
    )


def run(options: argparse.Namespace) -> int:
    """Plan, print and write, all on rank 0. Collective over MPI.COMM_WORLD."""
    run_on_rank_0(MPI.COMM_WORLD, lambda: _plan(options))
    return 0


def _plan(options: argparse.Namespace) -> None:
    if options.out is not None:
        check_writable("--out", options.out)
    if options.plot is not None:
        check_writable("--plot", options.plot)
        picture.check_format(options.plot)
    machine = Machine.load(options.machine).in_mode(step_mode(options))
    memory = options.memory or machine.memory_bytes
    names = ("optimizer_slots", "shard_optimizer", "memory_model", "workspace", "batch_norm")
    assumptions = asdict(Settings(**{name: getattr(options, name) for name in names}))
    sharded = options.shard_weights or False
    graph = trace_network(options)

    def planned(ranks: int) -> Strategy:
        return select(graph, machine, ranks, memory=memory, method=options.method, shard_weights=sharded, **assumptions)

    ranks, strategy, remark = choose_rank_count(planned, options.ranks)
    options = argparse.Namespace(**vars(options) | {"ranks": ranks})
    print(report.heading(options, graph, machine, memory))
    _print(options, strategy)
    if options.memory_model == "autograd":
        print(report.process_memory_line(options, graph, strategy, machine, memory))
    if strategy.estimated:
        print(
            "not all layers with weights were measured for these ranks: the times of the others are estimates by the "
            f"roofline; measure them with mpiexec -n {ranks} distconv profile{step_mode(options).options} "
            f"--model {options.model} ..."
        )
    if remark:
        print(remark)
    if options.out is not None:
        strategy.plan.save(options.out)
        print(f"plan: {options.out}; train with it: {report.training_command(options, graph)}")
    if options.plot is not None:
        fewer = select_strategies(
            graph,
            machine,
            rank_counts(options.ranks)[:-1],
            memory,
            options.method,
            shard_weights=sharded,
            **assumptions,
        )
        title = (
            f"{options.model}, {options.batch} samples, on {options.ranks} ranks of {machine.name} ({strategy.method})"
        )
        scaling = Scaling.of(graph, machine, {**fewer, options.ranks: strategy})
        halo = largest_halo(graph, strategy.prediction, options.ranks, machine.ranks_per_node)
        picture.draw(options.plot, strategy, scaling, halo=halo, memory=memory, title=title)
        print(f"figure: {options.plot}")


def _print(options: argparse.Namespace, strategy: Strategy) -> None:
    print(strategy.explain())
    for line in report.totals_table(strategy):
        print(line)
    for line in report.layer_table(strategy.prediction) if options.layers else ():
        print(line)

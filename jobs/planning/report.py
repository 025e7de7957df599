"""Printed report of ``distconv plan``: times of the plan and of pure parallelism, memory, and the next command.

Pure formatting. The strategy explains its own choices.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping

from distconv.jobs.mesh.recipe import CHANNELS
from distconv.layers.models import MESH_MODELS
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.cost.process_memory import MARGIN, process_memory
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.machine.step_mode import StepMode
from distconv.perfmodel.strategy.selection import Strategy
from distconv.plan import format_parts

from .options import step_mode
from .package_memory import packages_bytes

FIGURES = {
    "FP": "fp",
    "BPx": "bpx",
    "BPw": "bpw",
    "BPa": "bpa",
    "halo": "halo",
    "sync": "sync",
    "shuffle": "shuffle",
    "update": "update",
}
"""Column headers of predicted times, and the attributes of a prediction that hold them."""


def _figures(prediction: Prediction) -> dict[str, str]:
    """Return the columns of a prediction; gathers are shown if weights are sharded."""
    gathers = any(layer.gather for layer in prediction.layers.values())
    return FIGURES | ({"gather": "gather"} if gathers else {})


def heading(options: argparse.Namespace, graph: LayerGraph, machine: Machine, memory: float) -> str:
    """Return the first line: network, samples, ranks, machine and memory limit.

    Parameters
    ----------
    options : argparse.Namespace
        Options of ``distconv plan``.
    graph : LayerGraph
    machine : Machine
    memory : float
        Limit in bytes per rank.

    Returns
    -------
    str
    """
    mode = "" if step_mode(options) == StepMode() else f"; steps are {step_mode(options).name}"
    return (
        f"{options.model}: {options.batch} samples of {' x '.join(map(str, options.input))}, "
        f"{graph.operations[0].x.dtype}, {len(graph.deciding)} convolution and linear layers, on {options.ranks} ranks "
        f"of {machine.name} ({machine.ranks_per_node} per node) with at most {memory / 1e9:.4g} GB each{mode}"
    )


def totals_table(strategy: Strategy) -> Iterator[str]:
    """Yield a table of times summed over all layers, for the plan and pure parallelism, then bound and gap.

    Times are in milliseconds, without overlap except in the columns ``hidden`` and ``step``.
    """
    figures = _figures(strategy.prediction)
    heads = "".join(f" {head:>10}" for head in (*figures, "hidden", "step"))
    yield f"  {'ms of all layers':<24}{heads}  GB per rank"
    yield _total("this plan", strategy.prediction, figures)
    for name, alone in strategy.uniform.items():
        if alone is None:
            yield f"  pure {name:<19}   not possible: {strategy.impossible[name]}"
        else:
            yield _total(f"pure {name}, {format_parts(next(iter(alone.layers.values())).parts)}", alone, figures)
    proven = (
        f"gap {strategy.gap:.2%}{', the best' if strategy.optimal else ''}"
        if strategy.bound > 0
        else "nothing is proven"
    )
    yield f"  no plan over these candidates takes less than {1e3 * strategy.bound:.3f} ms: {proven}"


def _total(name: str, prediction: Prediction, figures: Mapping[str, str]) -> str:
    sums = {figure: sum(getattr(layer, figure) for layer in prediction.layers.values()) for figure in figures.values()}
    shown = "".join(f" {1e3 * value:>10.3f}" for value in (*sums.values(), prediction.hidden, prediction.time))
    return f"  {name:<24}{shown}  {prediction.memory / 1e9:>11.4g}"


def process_memory_line(
    options: argparse.Namespace, graph: LayerGraph, strategy: Strategy, machine: Machine, memory: float
) -> str:
    """Return a line with the memory of a rank that computes on a CPU, and whether it fits.

    Parameters
    ----------
    options : argparse.Namespace
        Options of ``distconv plan``.
    graph : LayerGraph
    strategy : Strategy
    machine : Machine
    memory : float
        Limit in bytes per rank.

    Returns
    -------
    str
    """
    grids = {
        name: AxisParts.from_axes(layer.parts, options.ranks, machine.ranks_per_node)
        for name, layer in strategy.prediction.layers.items()
    }
    taken = process_memory(graph, grids, strategy.prediction, packages_bytes(options.model))
    fits = "fits" if taken.fits(memory) else "does not fit"
    return (
        f"  where ranks compute on CPUs, a process takes {taken.total / 1e9:.4g} GB: "
        f"tensors {taken.tensors / 1e9:.4g}, libraries and MPI {taken.libraries / 1e9:.4g}, "
        f"inside convolutions {taken.convolutions / 1e9:.4g}, "
        f"free in the heap {taken.holes / 1e9:.4g}; {fits} into {memory / 1e9:.4g} GB with {MARGIN:.0%} to spare"
    )


def layer_table(prediction: Prediction) -> Iterator[str]:
    """Yield a table with a line per layer, which includes the operations that inherit its distribution."""
    width, figures = max(map(len, prediction.layers)), _figures(prediction)
    yield f"  {'ms of each layer':<{width}} {'distribution':<18}{''.join(f' {head:>10}' for head in figures)}"
    for name, layer in prediction.layers.items():
        times = "".join(f" {1e3 * getattr(layer, figure):>10.3f}" for figure in figures.values())
        yield f"  {name:<{width}} {format_parts(layer.parts):<18}{times}"


def predicts_classes(graph: LayerGraph) -> bool:
    """Return True if the network has one row of scores for each sample, as ``distconv train classify`` needs it."""
    return len(graph.operations[-1].y.shape) == 2


def training_command(options: argparse.Namespace, graph: LayerGraph) -> str:
    """Return the command, or the line of Python, that trains with the plan.

    Parameters
    ----------
    options : argparse.Namespace
        Options of ``distconv plan``.
    graph : LayerGraph
        Graph of the network; the shape of its output selects the command.

    Returns
    -------
    str
    """
    width = f" --width {options.width}" if options.width else ""
    classes = f" --classes {options.classes}" if options.classes else ""
    rest = f"--model {options.model}{width}{classes} --batch {options.batch} --plan {options.out}"
    rest += " --shard-optimizer" if options.shard_optimizer else ""
    # distconv train mesh accepts samples with these channels only, and builds its models without --classes.
    mesh = options.model in MESH_MODELS
    if mesh and options.input[0] == len(CHANNELS) and not options.classes:
        return f"mpiexec -n {options.ranks} distconv train mesh --data PATH {rest}"
    if not mesh and predicts_classes(graph):
        return f"mpiexec -n {options.ranks} distconv train classify --data PATH {rest}"
    if not options.shard_optimizer and len(graph.operations[-1].y.shape) == 1 + len(options.input):
        return f"mpiexec -n {options.ranks} distconv train segmentation --data PATH {rest}"
    return f"dc.parallelize(model, dc.Plan.load({str(options.out)!r})) on {options.ranks} ranks"

"""What ``distconv plan`` prints besides the strategy's own reasons: times of pure parallelism, and what to do next."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from distconv.jobs.mesh.recipe import CHANNELS
from distconv.layers.models import MESH_MODELS
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.cost.process_memory import MARGIN, process_memory
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.strategy.selection import Strategy
from distconv.plan import format_parts

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
"""Names of predicted times and where a prediction has them."""


def heading(options: argparse.Namespace, graph: LayerGraph, machine: Machine, memory: float) -> str:
    """What is planned, for what."""
    return (
        f"{options.model}: {options.batch} samples of {' x '.join(map(str, options.input))}, "
        f"{graph.operations[0].x.dtype}, {len(graph.deciding)} convolution and linear layers, on {options.ranks} ranks "
        f"of {machine.name} ({machine.ranks_per_node} per node) with at most {memory / 1e9:.4g} GB each"
    )


def totals(strategy: Strategy) -> Iterator[str]:
    """Sums over all layers, before anything is hidden, for the plan and for pure parallelism; bound and gap."""
    heads = "".join(f" {head:>10}" for head in (*FIGURES, "hidden", "step"))
    yield f"  {'ms of all layers':<24}{heads}  GB per rank"
    yield _total("this plan", strategy.prediction)
    for name, alone in strategy.uniform.items():
        if alone is None:
            yield f"  pure {name:<19}   not possible: {strategy.impossible[name]}"
        else:
            yield _total(f"pure {name}, {format_parts(next(iter(alone.layers.values())).parts)}", alone)
    yield f"  no plan over these candidates takes less than {1e3 * strategy.bound:.3f} ms: {_gap(strategy)}"


def _total(name: str, prediction: Prediction) -> str:
    sums = {figure: sum(getattr(layer, figure) for layer in prediction.layers.values()) for figure in FIGURES.values()}
    shown = "".join(f" {1e3 * value:>10.3f}" for value in (*sums.values(), prediction.hidden, prediction.time))
    return f"  {name:<24}{shown}  {prediction.memory / 1e9:>11.4g}"


def _gap(strategy: Strategy) -> str:
    if strategy.bound <= 0:
        return "nothing is proven"
    return f"gap {strategy.gap:.2%}{', the best' if strategy.optimal else ''}"


def process(options: argparse.Namespace, graph: LayerGraph, strategy: Strategy, machine: Machine, memory: float) -> str:
    """What a rank takes that is a process on a CPU, and whether that fits."""
    grids = {
        name: AxisParts.of(layer.parts, options.ranks, machine.ranks_per_node)
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


def layers(prediction: Prediction) -> Iterator[str]:
    """A line for each layer with all that inherits its distribution."""
    width = max(map(len, prediction.layers))
    yield f"  {'ms of each layer':<{width}} {'distribution':<18}{''.join(f' {head:>10}' for head in FIGURES)}"
    for name, layer in prediction.layers.items():
        times = "".join(f" {1e3 * getattr(layer, figure):>10.3f}" for figure in FIGURES.values())
        yield f"  {name:<{width}} {format_parts(layer.parts):<18}{times}"


def predicts_classes(graph: LayerGraph) -> bool:
    """Return True if the network has one row of scores for each sample, as ``distconv train classify`` needs it."""
    return len(graph.operations[-1].y.shape) == 2


def training(options: argparse.Namespace, graph: LayerGraph) -> str:
    """The command, or the line of Python, that trains with the plan."""
    width = f" --width {options.width}" if options.width else ""
    classes = f" --classes {options.classes}" if options.classes else ""
    rest = f"--model {options.model}{width}{classes} --batch {options.batch} --plan {options.out}"
    rest += " --shard-optimizer" if options.shard_optimizer else ""
    mesh = options.model in MESH_MODELS
    if mesh and options.input[0] == len(CHANNELS) and not options.classes:
        return f"mpiexec -n {options.ranks} distconv train mesh --data PATH {rest}"
    if not mesh and predicts_classes(graph):
        return f"mpiexec -n {options.ranks} distconv train classify --data PATH {rest}"
    if not options.shard_optimizer and len(graph.operations[-1].y.shape) == 1 + len(options.input):
        return f"mpiexec -n {options.ranks} distconv train segmentation --data PATH {rest}"
    return f"dc.parallelize(model, dc.Plan.load({str(options.out)!r})) on {options.ranks} ranks"

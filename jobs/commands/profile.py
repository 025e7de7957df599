"""Measure this machine for the planner: links, all-reduces, and the compute time of each layer.

Start it on as many ranks as a node has, or on two nodes to measure the network, too. Layers are measured with the
shapes of their blocks on ``--ranks`` ranks, which need not exist: warm-up runs, then the mean of ten (V-A). What the
file already holds is not measured again. A file can hold the times of contiguous and channels_last, eager and captured
steps; each start measures those of one mode.

With ``--layers``, writes a profile of the network's layers instead, measured in training steps of one process. Pipeline
stages are chosen from it (``distconv.perfmodel.partition``). With ``--devices``, all ranks measure, and the folder
``--out`` gets a profile for each device type. A sparse network is measured on voxelised embedded shapes of 4,096 points
each.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from mpi4py import MPI

from distconv.errors import DistconvError, MachineError
from distconv.jobs.planning.options import (
    add_network_arguments,
    add_step_mode_arguments,
    check_writable,
    run_on_first_ranks,
    run_on_rank_0,
    step_mode,
    trace_network,
)
from distconv.jobs.pointcloud.batches import VoxelRecipe, voxel_batch
from distconv.jobs.pointcloud.classification.trainer import NETWORKS
from distconv.jobs.pointcloud.sampling import DRAWN_POINTS
from distconv.jobs.pointcloud.shapes import Shapes
from distconv.jobs.training.model_factory import build_model
from distconv.jobs.training.options import add_device_argument, nonnegative_int, positive_int, select_device
from distconv.jobs.training.pipelines.options import add_devices_argument
from distconv.layers.models import MODELS
from distconv.layers.sparse import SparseTensor
from distconv.perfmodel.cost.candidates import Candidate, candidates
from distconv.perfmodel.cost.operation_work import LocalCall
from distconv.perfmodel.graph.graph import LayerGraph
from distconv.perfmodel.machine.links import Link, RankGroup
from distconv.perfmodel.machine.machine import Compute, Machine, Overlap, Roofline
from distconv.perfmodel.machine.measure_links import NetworkProfile, node_indices, profile_network
from distconv.perfmodel.machine.step_mode import StepMode
from distconv.perfmodel.profiles.layer_profile import mean_profile
from distconv.perfmodel.profiles.layer_timing import ITERATIONS, WARM_UP, Timing, time_layers
from distconv.perfmodel.profiles.measure_operations import (
    EAGER,
    ROUNDS,
    calls_of,
    measure,
    measure_exchange,
    measure_roofline,
    measure_sum,
)
from distconv.pipeline.runtime.device_kinds import kind_of_rank

T = TypeVar("T")

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv profile --out here.yaml
  mpiexec -n 2 distconv profile --out here.yaml --model resnet20 --input 3,32,32 --batch 16
  srun -N 2 --ntasks-per-node 4 distconv profile --out gpus.yaml --device cuda --model resnet50 --input 3,224,224 \\
    --batch 256 --ranks 4,16,64
  mpiexec -n 2 distconv profile --out here.yaml --model resnet20 --input 3,32,32 --batch 16 --captured
  distconv plan --machine here.yaml --model resnet20 --input 3,32,32 --batch 16 --ranks 2 --captured
  distconv profile --model vgg16 --layers
  distconv profile --layers --model vgg16 --input 3,64,64 --batch 8 --iterations 20 --out vgg16.json
  distconv profile --layers --model sparse_vgg16_bn --input 1,50,50,50 --batch 64 --warmup 1 --iterations 3
  mpiexec -n 4 distconv profile --layers --model resnet20 --batch 32 --devices titanxp:2,v100:2 --out layers
  srun -n 8 distconv profile --layers --model resnet20 --batch 32 --devices gpu --out layers
"""

SPARSE = {f"sparse_{name}": factory for name, factory in NETWORKS.items()}
"""Networks on voxels of point clouds, which ``--model`` accepts with ``--layers`` only."""

SPARSE_SAMPLE = (1, 32, 32, 32)
BATCH = 32
"""Samples of a step whose layers are timed, by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv profile``."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write, or to extend: a machine file, or with --layers a layer profile (default: "
        "MODEL-layers.json)",
    )
    parser.add_argument("--name", default=platform.node() or "here", help="name of the machine (default: %(default)s)")
    add_device_argument(parser)
    add_network_arguments(parser, required=False)
    parser.add_argument(
        "--ranks",
        type=lambda text: [positive_int(word) for word in text.split(",")],
        metavar="P,P",
        help="numbers of ranks whose block shapes are measured (default: 1 and the number of this job)",
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="write a profile of the network's layers, timed in training steps of one process, instead of a "
        "machine file",
    )
    add_step_mode_arguments(parser, "measure layers for")
    add_devices_argument(parser, "device type of each rank; --layers writes one profile per type")
    parser.add_argument(
        "--warmup",
        type=nonnegative_int,
        metavar="N",
        help=f"training steps before the measurement; goes with --layers (default: {WARM_UP})",
    )
    parser.add_argument(
        "--iterations",
        type=positive_int,
        metavar="N",
        help=f"training steps measured; goes with --layers (default: {ITERATIONS})",
    )


def run(options: argparse.Namespace) -> int:
    """Measure and write. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    device = torch.device(select_device(options.device, comm))
    if options.layers:
        if options.devices is None:
            run_on_rank_0(comm, lambda: _time_layers(options, device, comm.size))
        else:
            _time_kinds(options, device, comm)
        return 0
    machine = run_on_rank_0(comm, lambda: _load_machine(options))
    graph = None if options.model is None else trace_network(options)
    network, mode = None, step_mode(options)
    if machine is None:
        network = profile_network(comm, device)
        machine = measure_machine(options.name, network, comm, device)
    machine = measure_mode(machine, mode, comm, device)
    if graph is not None:
        machine = add_layer_times(machine, graph, options.ranks or [1, comm.size], comm, device, mode=mode)
    nodes = len(set(node_indices(comm)))
    run_on_rank_0(comm, lambda: _save(machine, network, nodes, options.out))
    return 0


def _load_machine(options: argparse.Namespace) -> Machine | None:
    if options.out is None:
        raise DistconvError("--out: missing. Name the machine file to write or to extend.")
    if options.warmup is not None or options.iterations is not None:
        raise DistconvError("--warmup, --iterations: only options of --layers. Add --layers or remove them.")
    if options.devices is not None:
        raise DistconvError(
            "--devices: only an option of --layers, which profiles the layers on each device type. Add --layers."
        )
    check_writable("--out", options.out)
    if options.model is not None and (options.input is None or options.batch is None):
        raise DistconvError(
            "--model: needs --input (the shape of one sample) and --batch (samples per step). Give both."
        )
    for name in ("ranks", "input", "batch", "width", "classes"):
        if options.model is None and getattr(options, name) is not None:
            raise DistconvError(f"--{name}: only an option of a network's layers. Name the network with --model.")
    return Machine.load(options.out) if options.out.exists() else None


def _save(machine: Machine, network: NetworkProfile | None, nodes: int, path: Path) -> None:
    machine.save(path)
    entries = [*machine.compute, *(entry for mode in machine.modes.values() for entry in mode)]
    count = sum(len(entry.table) for entry in entries)
    print(f"{path}: {machine.name}, {count} measured times of operations")
    if network is None:
        return
    ranks = machine.ranks_per_node
    for where, value, group, over in (
        ("on a node", network.node, RankGroup(ranks, ranks), f"its {ranks} ranks"),
        ("between nodes", network.network, RankGroup(nodes, 1), f"one rank of each of {nodes} nodes, all at once,"),
    ):
        if value is not None:
            measured, modelled = value.allreduce.send(2**20), machine.allreduce(group, 2**20)
            print(
                f"{where} an exchange takes {value.exchange.latency_s * 1e6:.1f} us and "
                f"{value.exchange.bandwidth_bytes_per_s / 1e9:.2f} GB/s, an allreduce of 1 MiB over {over} "
                f"{measured * 1e6:.0f} us ({modelled * 1e6:.0f} by the model)"
            )


# -- layers in training steps -----------------------------------------------------------------------------------------


def _time_layers(options: argparse.Namespace, device: torch.device, ranks: int) -> None:
    if ranks > 1:
        raise DistconvError(
            f"--layers: measures one process, but this job has {ranks} ranks. Start it without mpiexec, or "
            "give the device types of the ranks with --devices."
        )
    _check_layers(options)
    out = options.out or Path(f"{options.model.replace(':', '-')}-layers.json")
    check_writable("--out", out)
    timing, description = _time_network(options, device)
    print(description)
    _print_layers(timing)
    timing.profile.save(out)
    print(f"{out}: {len(timing.profile.layers)} layers")


def _time_kinds(options: argparse.Namespace, device: torch.device, comm: MPI.Intracomm) -> None:
    """Time the layers on all ranks at once, and write the mean profile of each device type. Collective."""

    def check() -> None:
        _check_layers(options)
        if options.out is None:
            raise DistconvError(
                "--devices: --out is missing. Name the folder for the layer profiles of the device types."
            )
        options.out.mkdir(parents=True, exist_ok=True)

    run_on_rank_0(comm, check)
    kind, own = kind_of_rank(options.devices, comm, device), list[Timing]()
    run_on_first_ranks(comm, comm.size, lambda: own.append(_time_network(options, device)[0]))
    timings = comm.gather((kind, own[0]), root=0)
    run_on_rank_0(comm, lambda: _save_kinds(timings or [], options))


def _save_kinds(timings: Sequence[tuple[str, Timing]], options: argparse.Namespace) -> None:
    for kind in dict.fromkeys(kind for kind, _ in timings):
        of_kind = [timing for each, timing in timings if each == kind]
        profile, path = mean_profile([timing.profile for timing in of_kind]), options.out / f"{kind}.json"
        profile.save(path)
        ratios = ", ".join(f"{timing.ratio:.3f}" for timing in of_kind)
        total = sum(layer.time_s for layer in profile.layers)
        print(
            f"{path}: {len(profile.layers)} layers, {1e3 * total:.3f} ms in all, the mean of {len(of_kind)} ranks; sum "
            f"of the layers over the full step without hooks: {ratios}"
        )


def _check_layers(options: argparse.Namespace) -> None:
    if options.model is None:
        raise DistconvError("--layers: --model is missing. Name a model, or your own as package.module:factory.")
    if options.ranks is not None:
        raise DistconvError(
            "--ranks: only an option of machine files, since --layers measures full layers. Remove --ranks."
        )
    if step_mode(options) != StepMode():
        raise DistconvError(
            "--captured, --memory-format: only options of machine files, since --layers times eager steps of "
            "contiguous tensors. Remove them."
        )
    _sample_shape(options)


def _time_network(options: argparse.Namespace, device: torch.device) -> tuple[Timing, str]:
    """Return the layers' times in this process, and a heading for them."""
    shape, batch = _sample_shape(options), options.batch or BATCH
    x: torch.Tensor | SparseTensor
    if options.model in SPARSE:
        torch.manual_seed(0)
        given = {"classes": options.classes, "width": options.width}
        model = SPARSE[options.model](**{key: value for key, value in given.items() if value is not None})
        # Embedded shapes, with the number of points that the paper draws.
        voxels = voxel_batch(Shapes(batch, DRAWN_POINTS), range(batch), VoxelRecipe(shape[-1]), 0)
        x = SparseTensor(voxels.coords.to(device), voxels.features.to(device), batch_size=batch)
        description = f"{x.shape[0]} voxels in {batch} samples"
    else:
        model = build_model(
            options.model, MPI.COMM_SELF, seed=0, in_channels=shape[0], classes=options.classes, width=options.width
        )
        x, description = torch.rand(batch, *shape, device=device), f"{batch} samples"
    warm_up = WARM_UP if options.warmup is None else options.warmup
    timing = time_layers(model.to(device), [x], warm_up, options.iterations or ITERATIONS)
    return timing, f"{options.model}, {description} of {'x'.join(map(str, shape))}, {device}, float32:"


def _sample_shape(options: argparse.Namespace) -> Sequence[int]:
    """Return the shape of one sample."""
    network = MODELS.get(options.model)
    usual = SPARSE_SAMPLE if options.model in SPARSE else network.sample if network else None
    shape: Sequence[int] | None = options.input or usual
    if shape is None and ":" not in options.model:
        names = ", ".join([*MODELS, *SPARSE])
        raise DistconvError(f"--layers: no such model ({options.model!r}). Use one of {names}.")
    if shape is None:
        raise DistconvError(f"--layers: the sample shape of {options.model} is unknown. Give it with --input C,H,W.")
    if options.model in SPARSE and (len(shape) != 4 or shape[0] != 1 or len(set(shape[1:])) > 1):
        raise DistconvError(
            f"--input {','.join(map(str, shape))}: the voxels of a cloud must form a cube. Use --input 1,R,R,R."
        )
    return shape


def _print_layers(timing: Timing) -> None:
    print(f"{'layer':<32}{'forward ms':>12}{'backward ms':>13}{'output kB':>12}{'parameters kB':>15}")
    for layer in timing.profile.layers:
        print(f"{layer.name:<32}{layer.forward_s * 1e3:>12.3f}{layer.backward_s * 1e3:>13.3f}", end="")
        print(f"{layer.activation_bytes / 1e3:>12.1f}{layer.parameter_bytes / 1e3:>15.1f}")
    total = sum(layer.time_s for layer in timing.profile.layers)
    print(
        f"sum of the layers {total * 1e3:.3f} ms, full step without hooks {timing.step_s * 1e3:.3f} ms: "
        f"ratio {timing.ratio:.3f}"
    )


# -- measuring --------------------------------------------------------------------------------------------------------


def measure_machine(name: str, network: NetworkProfile, comm: MPI.Intracomm, device: torch.device) -> Machine:
    """Measure how fast a rank computes, alone and with all ranks busy, and combine it with the links. Collective.

    Without a second rank on a node, or without a second node, the other link replaces the missing one.

    Parameters
    ----------
    name : str
        Name of the machine.
    network : NetworkProfile
        Links.
    comm : mpi4py.MPI.Intracomm
    device : torch.device

    Returns
    -------
    Machine
    """
    nodes = node_indices(comm)
    per_node = max(nodes.count(node) for node in nodes)
    near, far = network.node or network.network, network.network or network.node
    alone = Link(1e-6, 1e10)  # one rank sends nothing
    # MPI on the host makes no progress while torch computes.
    hides = device.type == "cuda"
    return Machine(
        name=name,
        ranks_per_node=per_node,
        memory_bytes=_memory_bytes(per_node, device),
        node=near.exchange if near else alone,
        network=far.exchange if far else alone,
        overlap=Overlap(hides, hides),
        compute=_rooflines(per_node, comm, device, StepMode()),
    )


def measure_mode(machine: Machine, mode: StepMode, comm: MPI.Intracomm, device: torch.device) -> Machine:
    """Measure how fast a rank computes in steps of a mode, unless the machine has it. Collective over ``comm``.

    Parameters
    ----------
    machine : Machine
    mode : StepMode
        Memory format, and eager or captured steps.
    comm : mpi4py.MPI.Intracomm
    device : torch.device

    Returns
    -------
    Machine
        With the mode.
    """
    if mode == StepMode() or mode.name in machine.modes:
        return machine
    return machine.with_mode(mode, _rooflines(machine.ranks_per_node, comm, device, mode))


def _rooflines(per_node: int, comm: MPI.Intracomm, device: torch.device, mode: StepMode) -> tuple[Compute, ...]:
    def roofline(group: MPI.Intracomm) -> Roofline:
        return _roofline(group, device, mode)

    return tuple(Compute(busy, _run_busy(busy, comm, roofline)) for busy in sorted({1, per_node}))


def _memory_bytes(per_node: int, device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node


def _roofline(comm: MPI.Intracomm, device: torch.device, mode: StepMode) -> Roofline:
    roofline = measure_roofline(comm, device, mode)
    if comm.size == 1:
        return roofline
    return replace(
        roofline, exchange_s=measure_exchange(comm, device, mode), gradient_s=measure_sum(comm, device, mode)
    )


def _run_busy(busy: int, comm: MPI.Intracomm, action: Callable[[MPI.Intracomm], T]) -> T:
    """Run ``action`` on rank 0 alone or on all ranks, and return its result on rank 0 everywhere. Collective."""
    if busy == 1:
        return run_on_first_ranks(comm, 1, lambda: action(MPI.COMM_SELF))
    return run_on_first_ranks(comm, comm.size, lambda: action(comm))


def add_layer_times(
    machine: Machine,
    graph: LayerGraph,
    ranks: Sequence[int],
    comm: MPI.Intracomm,
    device: torch.device,
    *,
    busy_ranks: int | None = None,
    rounds: int = ROUNDS,
    extra_candidates: Sequence[Candidate] = (),
    mode: StepMode = EAGER,
) -> Machine:
    """Add measured times of a network's local calls to a machine. Collective: call on every rank of ``comm``.

    Parameters
    ----------
    machine : Machine
        Machine whose tables are extended. Calls that a table has are not measured again.
    graph : LayerGraph
    ranks : sequence of int
        Numbers of ranks over which the network may be distributed.
    comm : mpi4py.MPI.Intracomm
    device : torch.device
    busy_ranks : int, optional
        Ranks that compute at the same time (default: those that share the network).
    rounds : int
        Rounds of :func:`measure`.
    extra_candidates : sequence of Candidate
        Distributions of all layers in addition to those of a search.
    mode : StepMode
        Mode of the measured steps, which :func:`measure_mode` has added to the machine.

    Returns
    -------
    Machine

    Raises
    ------
    MachineError
        On all ranks, if ``machine`` was measured with another number of ranks on a node.
    """
    nodes = node_indices(comm)
    per_node = max(nodes.count(node) for node in nodes)
    if per_node != machine.ranks_per_node:
        raise MachineError(
            f"machine {machine.name}: measured with {machine.ranks_per_node} ranks per node, but this job has "
            f"{per_node}. Start {machine.ranks_per_node} on each node, or write another file."
        )
    entries, of_mode = [], machine.in_mode(mode)
    for entry in of_mode.compute:
        counts = [count for count in ranks if of_mode.computing(busy_ranks or count).busy == entry.busy]
        calls: dict[str, LocalCall] = {}
        for count in counts:
            options = {
                name: [*few, *(extra_candidates if count > 1 else ())] for name, few in candidates(graph, count).items()
            }
            calls |= calls_of(graph, options, count, per_node)
        missing = {key: call for key, call in calls.items() if f"{key} forward" not in entry.table}
        found = _run_busy(entry.busy, comm, partial(measure, missing, device=device, rounds=rounds, mode=mode))
        entries.append(replace(entry, table={**entry.table, **found}))
    return machine.with_mode(mode, tuple(entries))


def combine_machines(machines: Sequence[Machine]) -> Machine:
    """Combine several profiles of one machine.

    Times are the minima, as other load on the machine only lengthens them. Rates and fixed costs, which are differences
    of times, are the medians.

    Parameters
    ----------
    machines : sequence of Machine
        Profiles of the machine.

    Returns
    -------
    Machine
    """
    names = machines[0].modes
    modes = {name: _combine([machine.modes[name] for machine in machines]) for name in names}
    return replace(machines[0], compute=_combine([machine.compute for machine in machines]), modes=modes)


def _combine(computes: Sequence[Sequence[Compute]]) -> tuple[Compute, ...]:
    entries = []
    for same in zip(*computes, strict=True):
        rates = zip(*(astuple(entry.roofline) for entry in same), strict=True)
        keys = set.intersection(*(set(entry.table) for entry in same))
        table = {key: min(entry.table[key] for entry in same) for key in keys}
        entries.append(replace(same[0], roofline=Roofline(*map(statistics.median, rates)), table=table))
    return tuple(entries)

"""``distconv profile``: measure this machine for the planner: links, allreduces, and each layer's compute.

Start it on as many ranks as a node has (on two nodes to measure the network too). Layers are measured at the extents
that their blocks have on ``--ranks`` ranks, which need not be there: warm-up runs, then the mean of ten (V-A). What the
file already has is not measured again.
"""

from __future__ import annotations

import argparse
import os
import platform
from dataclasses import replace
from pathlib import Path

import torch
from mpi4py import MPI

from distconv.errors import DistconvError
from distconv.perfmodel.evaluation import Model
from distconv.perfmodel.graph import LayerGraph
from distconv.perfmodel.links import Link
from distconv.perfmodel.machine import Compute, Machine, Overlap, Roofline
from distconv.perfmodel.measure import calls_of, measure, measure_exchange, measure_roofline
from distconv.perfmodel.network_profile import NetworkProfile, node_indices, profile_network
from distconv.perfmodel.plans import candidates
from distconv.perfmodel.settings import Settings
from distconv.perfmodel.work import LocalCall

from .exactness import wait_asleep
from .planning_options import add_network_arguments, check_writable, on_rank_0, traced
from .training_options import device_for, positive

EXAMPLES = """\
examples:
  mpiexec -n 2 distconv profile --out here.yaml
  mpiexec -n 2 distconv profile --out here.yaml --model resnet20 --input 3,32,32 --batch 16
  srun -N 2 --ntasks-per-node 4 distconv profile --out gpus.yaml --device cuda --model resnet50 --input 3,224,224 \\
    --batch 256 --ranks 4,16,64
  distconv plan --machine here.yaml --model resnet20 --input 3,32,32 --batch 16 --ranks 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv profile``."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="machine file to write, or to add to")
    parser.add_argument("--name", default=platform.node() or "here", help="name of the machine (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add_network_arguments(parser, required=False)
    parser.add_argument(
        "--ranks",
        type=lambda text: [positive(word) for word in text.split(",")],
        metavar="P,P",
        help="rank counts to measure layers for (default: 1 and those of this run)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure and write. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    device = torch.device(device_for(options.device, comm))
    known = on_rank_0(comm, lambda: _known(options))
    graph = None if options.model is None else traced(options)
    machine = profiled(known, options.name, graph, options.ranks or [1, comm.size], comm, device)
    on_rank_0(comm, lambda: _save(machine, options.out))
    return 0


def _save(machine: Machine, path: Path) -> None:
    machine.save(path)
    print(
        f"{path}: {machine.name}, {machine.ranks_per_node} ranks per node; an exchange takes "
        f"{machine.node.latency_s * 1e6:.1f} us and {machine.node.bandwidth_bytes_per_s / 1e9:.2f} GB/s on a node; "
        f"{sum(len(entry.table) for entry in machine.compute)} measured times of layers"
    )


def profiled(
    known: Machine | None,
    name: str,
    graph: LayerGraph | None,
    ranks: list[int],
    comm: MPI.Intracomm,
    device: torch.device,
) -> Machine:
    """This machine, with what of ``graph`` a rank computes on ``ranks`` ranks; ``known`` is not measured again.

    Collective over ``comm``.
    """
    nodes = node_indices(comm)
    per_node = max(nodes.count(node) for node in nodes)
    machine = known or _links(name, profile_network(comm, device), per_node, device)
    compute = {entry.busy: entry for entry in machine.compute} if known else {}
    for busy in sorted({1, min(per_node, comm.size)}):
        found = _computed(compute.get(busy), busy, graph, machine, ranks, comm, device)
        compute[busy] = comm.bcast(found)
    return replace(machine, compute=tuple(entry for _, entry in sorted(compute.items())))


def _known(options: argparse.Namespace) -> Machine | None:
    check_writable("--out", options.out)
    if options.model is not None and (options.input is None or options.batch is None):
        raise DistconvError("--model needs --input and --batch: the extents of one sample, and samples per step")
    return Machine.load(options.out) if options.out.exists() else None


def _links(name: str, measured: NetworkProfile, per_node: int, device: torch.device) -> Machine:
    """A machine with measured links. Where there is no second rank or node, the other link stands for it."""
    node = measured.node or measured.network
    network = measured.network or measured.node
    alone = Link(1e-6, 1e10)  # one rank alone sends nothing
    # MPI on the host makes no progress while torch computes.
    hides = device.type == "cuda"
    return Machine(
        name,
        per_node,
        _memory_bytes(per_node, device),
        node.exchange if node else alone,
        network.exchange if network else alone,
        Overlap(hides, hides),
        (Compute(1, measure_roofline(MPI.COMM_SELF, device)),),
    )


def _memory_bytes(per_node: int, device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / per_node


def _computed(
    known: Compute | None,
    busy: int,
    graph: LayerGraph | None,
    machine: Machine,
    ranks: list[int],
    comm: MPI.Intracomm,
    device: torch.device,
) -> Compute:
    """Compute with ``busy`` ranks of each node at work: what is known, and what is not yet."""
    if busy == 1 and comm.rank > 0:
        wait_asleep(comm)
        return Compute(1, machine.compute[0].roofline)
    group = MPI.COMM_SELF if busy == 1 else comm
    found = known or Compute(busy, _roofline(group, device))
    if graph is not None:
        counts = [count for count in ranks if min(count, machine.ranks_per_node) == busy]
        calls = _calls(graph, machine, counts)
        missing = {key: call for key, call in calls.items() if f"{key} forward" not in found.table}
        found = replace(found, table={**found.table, **measure(missing, group, device)})
    if busy == 1:
        wait_asleep(comm)
    return found


def _roofline(comm: MPI.Intracomm, device: torch.device) -> Roofline:
    found = measure_roofline(comm, device)
    return found if comm.size == 1 else replace(found, exchange_s=measure_exchange(comm, device))


def _calls(graph: LayerGraph, machine: Machine, counts: list[int]) -> dict[str, LocalCall]:
    calls: dict[str, LocalCall] = {}
    for count in counts:
        calls |= calls_of(Model.of(graph, machine, count, Settings()), candidates(graph, count))
    return calls

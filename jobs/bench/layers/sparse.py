"""Compare a 3^3 submanifold convolution on a surface with a dense convolution of its volume.

A step is forward and backward, to the weights and to the input. The kernel map is cached, or built in each step as in a
first layer. Variants are interleaved in one run, so that a drift of the machine's speed affects all of them. The peak
memory of each comes from one step in a process of its own. The dense convolution is left out above --cap.

Source: SparsePipe, Fig. 8: time and memory against resolution.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distconv.errors import GridError
from distconv.jobs.bench import report
from distconv.jobs.bench.child_processes import MIB, measure_first_step, run_in_new_process
from distconv.jobs.timing import medians, time_interleaved, timed_variants
from distconv.jobs.training.options import positive_int
from distconv.layers.sparse import SparseConv, SparseTensor, to_dense

EXAMPLES = """\
examples:
  distconv bench sparse
  distconv bench sparse --resolution 32 50 100 200 --rounds 3
"""

SPARSE, BUILT, DENSE = "sparse, map cached", "sparse, map built", "dense"
PERIODS = 2.5
"""Periods of the surface along each side. It fills about ``8 R^2`` voxels with a layer about one voxel thick."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv bench sparse``."""
    parser.add_argument(
        "--resolution",
        type=positive_int,
        nargs="+",
        default=[50],
        help="voxels along each side, one or more values (default: 50)",
    )
    parser.add_argument(
        "--channels", type=positive_int, default=32, help="input and output channels (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=9, help="interleaved repetitions of each variant (default: %(default)s)"
    )
    parser.add_argument(
        "--cap",
        type=positive_int,
        default=16,
        metavar="GIB",
        help="memory limit of the dense convolution, in GiB; it is left out above this limit (default: %(default)s)",
    )
    parser.add_argument("--alone", choices=(SPARSE, DENSE), help=argparse.SUPPRESS)
    report.add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print.

    Raises
    ------
    GridError
        If there are several ranks.
    """
    if MPI.COMM_WORLD.size > 1:
        raise GridError(f"measures one process, but there are {MPI.COMM_WORLD.size} ranks. Start it without mpiexec.")
    if options.alone:
        alone: str = options.alone
        peak = measure_first_step(lambda: variants(options.resolution[0], options.channels, (alone,))[alone])
        print(json.dumps(asdict(peak)))
        return 0
    print(
        report.heading(
            f"submanifold convolution 3^3, {options.channels} -> {options.channels}, float32, forward and backward, "
            f"{torch.get_num_threads()} thread(s)"
        )
    )
    figures = {str(resolution): _compare(options, resolution) for resolution in options.resolution}
    report.print_json({"resolution": figures}, options.json)
    return 0


def surface(resolution: int) -> torch.Tensor:
    """Return the coordinates (8 R^2, 4) of the voxels nearest to a gyroid in a cube of R^3, at most all voxels."""
    along = (torch.arange(resolution, dtype=torch.float64) + 0.5) * (2 * torch.pi * PERIODS / resolution)
    (sx, sy, sz), (cx, cy, cz) = (
        torch.meshgrid(f(along), f(along), f(along), indexing="ij") for f in (torch.sin, torch.cos)
    )
    level = sx * cy + sy * cz + sz * cx
    slopes = (cx * cy - sz * sx, cy * cz - sx * sy, cz * cx - sy * sz)
    slope = torch.stack([each.square() for each in slopes]).sum(0).sqrt()
    # To first order, the distance of a point to the surface is the level over its slope.
    distance = (level.abs() / slope.clamp(min=1e-9)).flatten()
    near = distance.argsort(stable=True)[: 8 * resolution**2].sort().values
    space = torch.stack([near // resolution**2, near // resolution % resolution, near % resolution], 1)
    return torch.cat([torch.zeros_like(space[:, :1]), space], 1)


def variants(resolution: int, channels: int, names: tuple[str, ...]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a function for each variant that takes a step with the same values and returns the weight gradient.

    Parameters
    ----------
    resolution : int
        Voxels along each side.
    channels : int
        Input and output channels.
    names : tuple of str
        Names of the variants.

    Returns
    -------
    dict of str to callable
        A function for each name.
    """
    torch.manual_seed(0)
    coords = surface(resolution)
    features, gradient = torch.randn(len(coords), channels), torch.randn(len(coords), channels)
    convolution = SparseConv(channels, channels, 3, bias=False)
    cached = SparseTensor(coords, features.clone().requires_grad_(), batch_size=1)

    def sparse(x: SparseTensor) -> torch.Tensor:
        return _weights_gradient(convolution, convolution(x).features, x.features, gradient)

    steps = {
        SPARSE: lambda: sparse(cached),
        BUILT: lambda: sparse(SparseTensor(coords, features.clone().requires_grad_(), batch_size=1)),
    }
    if DENSE in names:
        size = (resolution,) * 3
        volume, slope = (to_dense(SparseTensor(coords, v, batch_size=1), size) for v in (features, gradient))
        volume.requires_grad_()
        dense = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
        dense.load_state_dict(convolution.state_dict())
        steps[DENSE] = lambda: _weights_gradient(dense, dense(volume), volume, slope)
    return {name: steps[name] for name in names}


def _weights_gradient(
    convolution: nn.Module, outputs: torch.Tensor, inputs: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    return torch.autograd.grad(outputs, (*convolution.parameters(), inputs), gradient)[0]


def dense_bytes(resolution: int, channels: int) -> int:
    """Return the bytes of dense input, output and their gradients in float32, a lower bound.

    Parameters
    ----------
    resolution : int
        Voxels along each side.
    channels : int
        Input and output channels.

    Returns
    -------
    int
    """
    return 4 * 4 * channels * resolution**3


def _compare(options: argparse.Namespace, resolution: int) -> dict[str, Any]:
    """Measure and print time and memory of all variants at one resolution."""
    estimate, cap = dense_bytes(resolution, options.channels), options.cap << 30
    names = (SPARSE, BUILT, DENSE) if estimate <= cap else (SPARSE, BUILT)
    used = {
        name: run_in_new_process(
            ["sparse", "--alone", name, "--resolution", str(resolution), "--channels", str(options.channels)]
        ).used
        for name in names
        if name != BUILT
    }
    times = time_interleaved(
        MPI.COMM_SELF, timed_variants(variants(resolution, options.channels, names)), options.rounds
    )
    sites = len(surface(resolution))
    memory = {name: f"  {size / MIB:8.0f} MiB" for name, size in used.items()}
    print(f"\n{sites} voxels of {resolution}^3\n{report.time_table(times, DENSE, suffixes=memory)}")
    if DENSE not in times:
        print(f"{DENSE}: {estimate / MIB:.0f} MiB at least, above --cap {options.cap} GiB: not run")
    return {"sites": sites, "median_s": medians(times), "memory_bytes": used, "dense_estimate_bytes": estimate}

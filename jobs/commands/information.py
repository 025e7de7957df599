"""Print the environment of distconv: versions, MPI library, ranks, threads, devices, environment variables."""

from __future__ import annotations

import argparse
import os
import platform
import re
from pathlib import Path

import h5py
import mpi4py
import numpy as np
import torch
from mpi4py import MPI

import distconv
from distconv.communication.gpu import cuda_aware, device_transport
from distconv.errors import CommunicatorError
from distconv.local_device import device
from distconv.process import environment
from distconv.process.memory import allocator

EXAMPLES = """\
examples:
  distconv info
  mpiexec -n 4 distconv info
"""

_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options: the command has none."""


def run(options: argparse.Namespace) -> int:
    """Print on rank 0 what all ranks found. Collective over MPI.COMM_WORLD."""
    lines = describe(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            print(f"{name:<{width}}  {value}")
    return 0


def describe(comm: MPI.Intracomm) -> list[tuple[str, str]]:
    """Return name and value of each line. Collective."""
    hosts = comm.allgather(platform.node())
    threads = comm.allgather(torch.get_num_threads())
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hdf5 = f"h5py {h5py.__version__} (HDF5 {h5py.version.hdf5_version})"
    versions = f"mpi4py {mpi4py.__version__}, numpy {np.__version__}, {hdf5}"
    library = MPI.Get_library_version().strip("\0 \n").splitlines()
    return [
        ("distconv", distconv.__version__),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__}"),
        ("libraries", versions),
        ("MPI library", ", ".join(part.strip() for part in library[:2])),
        ("MPI threads", _THREAD_LEVELS.get(MPI.Query_thread(), "unknown")),
        ("ranks", f"{comm.size} on {len(set(hosts))} node{'s' if len(set(hosts)) > 1 else ''}"),
        ("cores of rank 0", str(cores)),
        (
            "torch threads",
            f"{min(threads)} to {max(threads)} per rank" if len(set(threads)) > 1 else f"{threads[0]} per rank",
        ),
        ("CUDA devices", ", ".join(torch.cuda.get_device_name(i) for i in range(devices)) or "none"),
        ("devices of the ranks", ", ".join(dict.fromkeys(comm.allgather(str(device()))))),
        ("transport", _transport(comm)),
        ("allocator", allocator.describe()),
        ("memory of a rank", _memory(comm)),
        *(
            (variable.name, os.environ.get(variable.name) or f"not set: {variable.default}")
            for variable in environment.VARIABLES
        ),
    ]


def _memory(comm: MPI.Intracomm) -> str:
    """Return a line with the memory of the largest rank before it has any tensor. Collective."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    resident = {name: int(kib) << 10 for name, kib in re.findall(r"^Rss(\w+):\s+(\d+) kB", status, re.MULTILINE)}
    largest = max(comm.allgather(resident), key=lambda each: sum(each.values()))
    if not largest:
        return "unknown"
    files, own, shared = (largest.get(name, 0) for name in ("File", "Anon", "Shmem"))
    return (
        f"{(files + own + shared) >> 20} MiB before any tensor: {files >> 20} of libraries' files, which ranks "
        f"of a node share, {own >> 20} of its own, {shared >> 20} shared by MPI (in training: distconv plan)"
    )


def _transport(comm: MPI.Intracomm) -> str:
    gpu = device()
    if device_transport.needs_process_groups() and gpu.type == "cpu":
        return "torch's process groups by gloo"
    if not all(comm.allgather(gpu.type == "cuda")):
        return "host memory"
    try:
        taken = cuda_aware.probe_mpi_support(comm, gpu)
    except CommunicatorError as error:
        return str(error)
    by_mpi = "MPI from device memory" if taken.messages else "MPI by way of host memory"
    by_mpi += ", sums by way of host memory" if taken.messages and not taken.sums else ""
    missing = device_transport.describe_missing(comm, gpu)
    return f"{by_mpi}; no NCCL: {missing}" if missing else f"NCCL, or {by_mpi}: what is faster"

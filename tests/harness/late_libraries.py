"""CuPy and its NCCL for a GPU that is not there (:mod:`.late_gpu`): they move bytes when its streams get there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from mpi4py import MPI

from distconv.communication import nccl, staging
from distconv.kernels import packing
from tests.harness import kernels_in_c
from tests.harness.late_gpu import DEVICE, LateGpu, Stream


class LateNccl:
    """CuPy's binding of NCCL: what it launches moves when its stream gets there."""

    NCCL_FLOAT32, NCCL_FLOAT64, NCCL_INT32, NCCL_INT64, NCCL_UINT8 = (
        MPI.FLOAT,
        MPI.DOUBLE,
        MPI.INT32_T,
        MPI.INT64_T,
        MPI.BYTE,
    )
    _OPERATIONS = (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN)

    class NcclError(RuntimeError):
        """As CuPy's."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.grouped: list[tuple[Any, int, Sequence[Any], int]] = []

    def get_unique_id(self) -> str:
        return "number"

    def NcclCommunicator(self, size: int, identifier: str, rank: int) -> LateCommunicator:
        assert (size, identifier, rank) == (self.comm.size, "number", self.comm.rank)
        return LateCommunicator(self, self.comm.Dup())

    def groupStart(self) -> None:
        assert not self.grouped

    def groupEnd(self) -> None:
        grouped, self.grouped = self.grouped, []
        if not grouped:
            return
        assert len({stream for *_, stream in grouped}) == 1

        def work() -> None:
            MPI.Request.Waitall([act([_bytes(*memory), MPI.BYTE], peer) for act, peer, memory, _ in grouped])

        LateGpu.running.streams[grouped[0][-1]].give(work)


class LateCommunicator:
    """As CuPy's."""

    def __init__(self, library: LateNccl, comm: MPI.Intracomm) -> None:
        self.library, self.comm, self.lost = library, comm, False

    def send(self, address: int, count: int, kind: MPI.Datatype, peer: int, stream: int) -> None:
        self.library.grouped.append((self.comm.Isend, peer, (address, count * kind.Get_size()), stream))

    def recv(self, address: int, count: int, kind: MPI.Datatype, peer: int, stream: int) -> None:
        self.library.grouped.append((self.comm.Irecv, peer, (address, count * kind.Get_size()), stream))

    def allReduce(self, sent: int, into: int, count: int, kind: MPI.Datatype, op: int, stream: int) -> None:
        assert sent == into
        memory = _bytes(into, count * kind.Get_size())
        reduce, operation = self.comm.Allreduce, self.library._OPERATIONS[op]
        LateGpu.running.streams[stream].give(lambda: reduce(MPI.IN_PLACE, [memory, kind], operation))

    def check_async_error(self) -> None:
        if self.lost:
            raise self.library.NcclError("unhandled system error")


def _bytes(address: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(address)


class LateCupy:
    """CuPy, whose raw kernel is the C compiler's and runs when its stream gets there."""

    launches = 0

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu, self._stream, self.cuda, self.Stream = gpu, gpu.stream, self, self

    def Device(self, number: int) -> contextlib.AbstractContextManager[None]:
        assert number == DEVICE.index
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def from_external(self, stream: Stream) -> Iterator[None]:
        before, self._stream = self._stream, self._gpu.streams[stream.__cuda_stream__()[1]]
        try:
            yield
        finally:
            self._stream = before

    def RawKernel(self, text: str, name: str) -> Callable[..., None]:
        assert name == "move"
        run = kernels_in_c.compiled(text)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            LateCupy.launches += 1
            self._stream.give(lambda: run(*grid, *block, arguments))

        return launch


@contextlib.contextmanager
def late_gpu(order: str) -> Iterator[LateGpu]:
    """A late GPU while the block runs; all that it was given is done at the end. Collective, if ranks exchange."""
    caches = (staging._copying, staging.cuda_aware, nccl._stream, packing.compiled)
    gpu = LateGpu(order)
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        patch.setattr(packing, "_cupy", functools.cache(lambda: LateCupy(gpu) if kernels_in_c.COMPILER else None))
        for cache in caches:
            cache.cache_clear()
        try:
            with gpu.by_itself():
                yield gpu
                gpu.synchronize()
        finally:
            for cache in caches:
                cache.cache_clear()
            nccl._under_way.clear()
            LateGpu.running = None

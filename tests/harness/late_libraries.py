"""CuPy and NCCL for a GPU that is not there (:mod:`.late_gpu`): they move bytes when its streams get there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from distconv.communication import transport
from distconv.communication.gpu import nccl, staging
from distconv.kernels import packing
from tests.harness import kernels_in_c
from tests.harness.late_gpu import DEVICE, LateGpu, Stream


class LateWork:
    """Tensors that were passed to a process group, as torch's ``Work``."""

    def __init__(self, group: LateGroup) -> None:
        self._group, self._end = group, group.stream.record_event()

    def is_completed(self) -> bool:
        return self._end.query()

    def wait(self) -> None:
        if self._group.lost:
            raise RuntimeError("NCCL error: unhandled system error\nException raised from checkForNCCLErrors")
        LateGpu.running.stream.wait_event(self._end)


class LateGroup:
    """Torch's process group by NCCL: what it is given moves when its stream gets there."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.stream, self.lost, self.ended = comm, Stream(), False, ""
        self._grouped: list[tuple[Any, int, Any]] | None = None

    def _start_coalescing(self) -> None:
        assert self._grouped is None
        self._grouped = []

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        assert self._grouped is not None
        self._grouped.append((self.comm.Isend, peer, *tensors))

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        assert self._grouped is not None
        self._grouped.append((self.comm.Irecv, peer, *tensors))

    def _end_coalescing(self) -> LateWork | None:
        assert self._grouped is not None
        grouped, self._grouped = self._grouped, None
        if not grouped:
            return None

        def work() -> None:
            MPI.Request.Waitall([act([_memory(tensor), MPI.BYTE], peer) for act, peer, tensor in grouped])

        return self._given(work)

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> LateWork:
        (tensor,) = tensors
        operation = next(op for op, name in nccl._OPERATIONS if options.reduceOp == getattr(dist.ReduceOp, name))
        memory, kind, reduce = _memory(tensor), transport._MPI_TYPES[tensor.dtype], self.comm.Allreduce
        return self._given(lambda: reduce(MPI.IN_PLACE, [memory, kind], operation))

    def _given(self, work: Callable[[], None]) -> LateWork:
        self.stream.wait_stream(LateGpu.running.stream)
        self.stream.give(work)
        return LateWork(self)

    def shutdown(self) -> None:
        self.ended = "shut down"

    def abort(self) -> None:
        self.ended = "aborted"


def _memory(tensor: torch.Tensor) -> Any:
    return _bytes(tensor.data_ptr(), tensor.nbytes)


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
    caches = (staging._copy_streams, packing.is_available, packing.compile_kernel)
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
            LateGpu.running = None

"""CUDA kernels compiled by the machine's C compiler: a loop stands for the threads.

They run last to first: an element that two threads write shows.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distconv.kernels import packing

COMPILER = shutil.which("cc")

_BEFORE = """
#define __global__ static
#define __device__
#define __grid_constant__
typedef struct { unsigned x, y, z; } dim3;
static dim3 threadIdx, blockIdx, blockDim, gridDim;
"""

_AFTER = """
void run(unsigned blocks, unsigned threads, const memory *tensors, ELEMENT *buffer, const long long *table, int cells,
         long long elements, int action)
{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = blocks; blockIdx.x-- > 0;)
        for (threadIdx.x = threads; threadIdx.x-- > 0;)
            move(*tensors, buffer, table, cells, elements, action);
}
"""


@functools.cache
def compiled(text: str) -> Callable[[int, int, tuple[Any, ...]], None]:
    """The kernel of ``packing`` with this source: takes blocks, threads of each, and the kernel's arguments."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        source.write_text(_BEFORE + text + _AFTER)
        warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-strict-prototypes"]
        flags = ["-std=c99", "-O1", *warnings, "-shared", "-fPIC"]
        subprocess.run([str(COMPILER), *flags, "-o", str(library), str(source)], check=True)
        run = ctypes.CDLL(str(library)).run

    def launch(blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        memory, buffer, table, cells, elements, action = arguments
        addresses = (ctypes.c_void_p(int(address)) for address in (memory.ctypes.data, buffer, table))
        numbers = ctypes.c_int(int(cells)), ctypes.c_longlong(int(elements)), ctypes.c_int(int(action))
        run(ctypes.c_uint(blocks), ctypes.c_uint(threads), *addresses, *numbers)

    return launch


def launched(text: str) -> packing.Launch:
    """The same in place of ``packing.compile_kernel``, for tensors of the CPU; it has run when it returns."""
    run = compiled(text)
    return lambda table, blocks, arguments: run(blocks, packing.THREADS, arguments)

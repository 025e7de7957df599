"""Packing on a GPU: one kernel (``packing.cu``) copies boxes of strided tensors to and from a buffer.

CuPy compiles the kernel at its first use. The kernel reads the boxes from a table on the device.
:mod:`distconv.communication.packing` calls it.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from distconv.distribution import Region

MOST_TENSORS = 16
"""Largest number of tensors in a launch: two slabs of ghosts for each of eight dimensions."""

THREADS = 256
"""Threads of a CUDA block."""

_MAX_BLOCKS = 1 << 16
"""Maximum number of CUDA blocks of a launch. With more elements each thread moves several."""

_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "bits128"}
_SUMS = {
    torch.bool: ("unsigned char", "a | b"),
    **{dtype: (_BITS[dtype.itemsize], "a + b") for dtype in (torch.uint8, torch.int8, torch.int16)},
    **{dtype: (_BITS[dtype.itemsize], "a + b") for dtype in (torch.int32, torch.int64)},
    torch.float16: ("unsigned short", "to_float16(from_float16(a) + from_float16(b))"),
    torch.bfloat16: ("unsigned short", "to_bfloat16(from_bfloat16(a) + from_bfloat16(b))"),
    torch.float32: ("float", "a + b"),
    torch.float64: ("double", "a + b"),
    torch.complex64: ("complex64", "complex64_sum(a, b)"),
    torch.complex128: ("complex128", "complex128_sum(a, b)"),
}
"""By dtype: the C type of an element, and the C expression of the sum of two elements a and b."""

Launch = Callable[[torch.Tensor, int, tuple[Any, ...]], None]
"""Function that launches a compiled kernel, given its table, the number of CUDA blocks, and its arguments."""


class PackingAction(enum.IntEnum):
    """Operation on each element of a box, in the kernel's numbering."""

    PACK = 0
    UNPACK = 1
    ADD = 2


class PackedRegions:
    """Boxes of tensors, and their positions in a buffer.

    Boxes may overlap: values are added to an element in the order of the boxes, as if box after box were added.

    Parameters
    ----------
    regions : sequence of (Region, int)
        The boxes, and the index in the buffer of the first element of each.
    strides : sequence of tuple of int
        The strides of the tensors, in elements.
    """

    def __init__(self, regions: Sequence[tuple[Region, int]], strides: Sequence[tuple[int, ...]]) -> None:
        assert len(strides) <= MOST_TENSORS
        # A number without dimensions counts as one dimension of size 1.
        self._dims = max(1, len(strides[0]))
        self._table, self._cells, self._elements = _table(regions, strides)
        self._tables: dict[torch.device, torch.Tensor] = {}
        """Copies of the table, by device."""

    def pack(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy the boxes of some tensors to their positions in a buffer, on torch's current stream.

        Parameters
        ----------
        tensors : sequence of Tensor
            Tensors on one GPU, of one dtype, with the strides that the constructor received.
        buffer : Tensor
            One dimension, contiguous, of the same dtype and device.
        """
        self._move(PackingAction.PACK, tensors, buffer)

    def unpack(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy values from a buffer to the boxes of some tensors, on torch's current stream.

        Parameters
        ----------
        tensors, buffer
            As in :meth:`pack`. Where boxes overlap, the buffer must have the same values for each of them.
        """
        self._move(PackingAction.UNPACK, tensors, buffer)

    def add(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Add values from a buffer to the boxes of some tensors, on torch's current stream.

        Parameters
        ----------
        tensors, buffer
            As in :meth:`pack`, of a dtype that :func:`can_add` accepts.
        """
        self._move(PackingAction.ADD, tensors, buffer)

    def _move(self, action: PackingAction, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        if not self._elements:
            return  # CUDA rejects a launch of no blocks
        table = self._tables.get(buffer.device)
        if table is None:
            table = self._tables[buffer.device] = torch.as_tensor(self._table, device=buffer.device)
        # A structure of fixed size, which CUDA copies with the arguments of the kernel.
        memory = np.zeros(1, dtype=[("at", np.uintp, (MOST_TENSORS,))])
        memory["at"][0, : len(tensors)] = [tensor.data_ptr() for tensor in tensors]
        addresses = np.uintp(buffer.data_ptr()), np.uintp(table.data_ptr())
        launch = compile_kernel(kernel_source(buffer.dtype, self._dims, self._elements))
        blocks = min(_MAX_BLOCKS, -(-self._elements // THREADS))
        launch(table, blocks, (memory, *addresses, np.int32(self._cells), np.int64(self._elements), np.int32(action)))


@functools.cache
def is_available(device: torch.device, dtype: torch.dtype, dims: int) -> bool:
    """Return True if the kernel runs on a device; the first call tries it on one element.

    It needs CuPy 14. The trial fails if there is no compiler, the driver is older than the compiler, or the GPU is too
    old (compute capability below 7.0). A failed trial warns.

    Parameters
    ----------
    device : torch.device
        A GPU.
    dtype : torch.dtype
        The dtype of the tensors.
    dims : int
        Their number of dimensions.
    """
    if _cupy() is None or not hasattr(torch.cuda.Stream, "__cuda_stream__"):
        return False  # no CuPy, or a version of torch whose streams CuPy does not accept
    # Bytes that are not 0, so that values that were not moved are noticed.
    sent, message = (torch.full((dtype.itemsize,), n, dtype=torch.uint8, device=device) for n in (1, 0))
    once = (1,) * dims
    try:
        element = PackedRegions([(Region(0, (0,) * dims, once), 0)], [once])
        element.pack([sent.view(dtype).view(once)], message.view(dtype))
        reason = "" if torch.equal(sent, message) else "the kernel has moved wrong values"
    except Exception as error:  # CuPy's errors have no common base
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason:
        warnings.warn(
            f"messages of {dtype} are packed one box at a time, which is slower, since CuPy's kernel does not run on "
            f"{device}: {reason}",
            stacklevel=2,
        )
    return not reason


@functools.cache
def _cupy() -> Any:
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return cupy if hasattr(cupy.cuda.Stream, "from_external") else None


def can_add(dtype: torch.dtype) -> bool:
    """Return True if the kernel can add elements of ``dtype``. It copies elements of any dtype."""
    return dtype in _SUMS


def kernel_source(dtype: torch.dtype, dims: int, elements: int) -> str:
    """Return the CUDA source of the kernel.

    Parameters
    ----------
    dtype : torch.dtype
        The dtype of the tensors.
    dims : int
        Their number of dimensions.
    elements : int
        Number of elements of all boxes, which selects the index type.

    Returns
    -------
    str
        Definitions for the preprocessor, followed by ``packing.cu``.
    """
    # A dtype without a sum: the source must still compile, and ADD is never launched.
    element, total = _SUMS.get(dtype) or (_BITS[dtype.itemsize], "b")
    # Arithmetic of 32 bits is faster on a GPU.
    index = "unsigned int" if elements < 1 << 31 else "unsigned long long"
    sizes = {"INDEX": index, "DIMS": dims, "MOST_TENSORS": MOST_TENSORS}
    defined = {"ELEMENT": element, "SUM(a, b)": f"({total})", **sizes}
    return "".join(f"#define {name} {value}\n" for name, value in defined.items()) + _load_source()


@functools.cache
def _load_source() -> str:
    return Path(__file__).with_suffix(".cu").read_text()


@functools.cache
def compile_kernel(text: str) -> Launch:
    """Compile a source and return the function that launches the kernel on torch's current stream."""
    cupy = _cupy()
    kernel = cupy.RawKernel(text, "move")

    def launch(table: torch.Tensor, blocks: int, arguments: tuple[Any, ...]) -> None:
        stream = torch.cuda.current_stream(table.device)
        # The table may be freed while the kernel reads it, and was allocated on another stream.
        table.record_stream(stream)
        with cupy.cuda.Device(table.device.index), cupy.cuda.Stream.from_external(stream):
            kernel((blocks,), (THREADS,), arguments)

    return launch


# -- the table ---------------------------------------------------------------------------------------------------------


def _table(
    regions: Sequence[tuple[Region, int]], strides: Sequence[tuple[int, ...]]
) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return the table (see ``packing.cu``), the number of its cells, and the number of their elements."""
    cells: list[tuple[int, ...]] = []
    positions: list[tuple[int, ...]] = []
    elements = 0
    for tensor, own in enumerate(strides):
        for cell, inside in _cells([each for each in regions if each[0].tensor == tensor]):
            offset = _offset(cell.first, own)
            cells.append(
                (elements, tensor, offset, len(positions), len(inside), *(cell.extents or (1,)), *(own or (0,)))
            )
            for region, start in inside:
                # Strides of the region's values in the buffer, where they are contiguous.
                packed = tuple(math.prod(region.extents[dim + 1 :]) for dim in range(len(region.extents)))
                within = [a - b for a, b in zip(cell.first, region.first, strict=True)]
                positions.append((start + _offset(within, packed), *(packed or (0,))))
            elements += cell.numel
    flat = [value for row in (*cells, *positions) for value in row]
    return np.array(flat, dtype=np.int64), len(cells), elements


def _cells(regions: Sequence[tuple[Region, int]]) -> Iterator[tuple[Region, list[tuple[Region, int]]]]:
    """Yield disjoint boxes that cover ``regions`` (of one tensor), each with the regions that contain it.

    Regions that overlap are split at the edges of all of them.
    """
    for group in _overlapping([region for region, _ in regions]):
        members = [regions[number] for number in group]
        edges = [sorted({edge for ends in each for edge in ends}) for each in _ends([region for region, _ in members])]
        # Between two edges no region begins or ends, so a region contains all of a cell or nothing.
        for corner in itertools.product(*(itertools.pairwise(each) for each in edges)):
            first, extents = tuple(low for low, _ in corner), tuple(high - low for low, high in corner)
            inside = [
                (region, start)
                for region, start in members
                if all(low <= at < low + n for low, n, at in zip(region.first, region.extents, first, strict=True))
            ]
            if inside:
                yield Region(inside[0][0].tensor, first, extents), inside


def _ends(regions: Sequence[Region]) -> list[list[tuple[int, int]]]:
    """Return for each dimension the start and the stop of each region."""
    return [
        [(region.first[dim], region.first[dim] + region.extents[dim]) for region in regions]
        for dim in range(len(regions[0].first))
    ]


def _overlapping(regions: Sequence[Region]) -> list[list[int]]:
    """Return the indices of ``regions`` in groups, such that regions of different groups are disjoint."""
    if not regions:
        return []
    is_overlapping = np.ones((len(regions), len(regions)), dtype=bool)
    for ends in _ends(regions):
        low, high = np.array(ends).T
        is_overlapping &= (low[:, None] < high) & (high[:, None] > low)
    # Regions that overlap with a common one belong to one group, even if they do not overlap with each other.
    _, labels = connected_components(coo_matrix(is_overlapping), directed=False)
    groups: dict[int, list[int]] = {}
    for number, label in enumerate(labels.tolist()):
        groups.setdefault(label, []).append(number)
    return list(groups.values())


def _offset(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))

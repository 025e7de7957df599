"""Packing: boxes of tensors side by side in contiguous messages, and back.

torch copies box by box; on a GPU one kernel moves all boxes at once (:mod:`distconv.kernels.packing`), where there is a
CuPy that can launch it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from distconv import recording
from distconv.distribution import Region

if TYPE_CHECKING:
    from distconv.kernels.packing import PackedRegions

_ALIGNED = 16
"""Messages in a buffer start at multiples of this many elements."""


class Room(NamedTuple):
    """Memory for messages; those that are packed lie side by side in ``buffer``."""

    messages: list[torch.Tensor]
    buffer: torch.Tensor | None


class Packing:
    """Messages of boxes of some tensors, for each message its boxes; the tensors' shapes never change.

    A message that is one box which is contiguous in its tensor is that memory, without a copy.
    """

    def __init__(self, messages: Sequence[Sequence[Region]]) -> None:
        self._messages = messages
        self._layouts: dict[tuple[object, ...], _Layout] = {}

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The messages: what ``tensors`` hold in their boxes."""
        if not self._messages:
            return []
        if not _by_kernel(tensors[0]):
            return [_joined([tensors[r.tensor][r.slices] for r in regions]) for regions in self._messages]
        tensors = [in_memory(tensor) for tensor in tensors]
        layout = self._layout(tensors, in_place=True)
        messages, buffer = layout.room(tensors)
        if buffer is not None:
            recording.launch(lambda to, *boxes: layout.by_kernel.pack(boxes, to), buffer, *tensors)
        return messages

    def room(self, tensors: Sequence[torch.Tensor]) -> Room:
        """Memory to receive the messages into, for :meth:`unpack`."""
        return self._layout(tensors, in_place=True).room(tensors) if self._messages else Room([], None)

    def unpack(self, room: Room, tensors: Sequence[torch.Tensor]) -> None:
        """Put what was received into the boxes of ``tensors``, for which ``room`` was made."""
        if room.buffer is None:
            return
        layout = self._layout(tensors, in_place=True)
        if _by_kernel(tensors[0]):
            recording.launch(lambda of, *boxes: layout.by_kernel.unpack(boxes, of), room.buffer, *tensors)
            return
        for region, place in layout.places(room.buffer):
            tensors[region.tensor][region.slices] = place

    def room_for_sums(self, like: torch.Tensor) -> Room:
        """Memory to receive the messages into, for :meth:`add`; of the dtype and device of ``like``."""
        return self._layout([like], in_place=False).room([like]) if self._messages else Room([], None)

    def add(self, room: Room, tensors: Sequence[torch.Tensor]) -> None:
        """Add what was received to the boxes of ``tensors``, in the order of the messages."""
        if room.buffer is None:
            return
        layout = self._layout(tensors, in_place=False)
        if _by_kernel(tensors[0], adds=True):
            recording.launch(lambda of, *boxes: layout.by_kernel.add(boxes, of), room.buffer, *tensors)
            return
        for region, place in layout.places(room.buffer):
            tensors[region.tensor][region.slices] += place

    def _layout(self, tensors: Sequence[torch.Tensor], *, in_place: bool) -> _Layout:
        # Shapes never change, strides may: channels-last blocks lie otherwise, and other boxes of them are contiguous.
        strides = tuple(tensor.stride() for tensor in tensors)
        layout = self._layouts.get((in_place, strides))
        if layout is None:
            whole = [in_place and len(regions) == 1 and _contiguous(regions[0], tensors) for regions in self._messages]
            layout = self._layouts[in_place, strides] = _Layout(self._messages, whole, strides)
        return layout


class _Layout:
    """Where the boxes of messages lie in their buffer, if they are boxes of tensors with these strides.

    ``whole`` says of each message that it is the memory of its one box.
    """

    def __init__(
        self, messages: Sequence[Sequence[Region]], whole: Sequence[bool], strides: Sequence[tuple[int, ...]]
    ) -> None:
        self._strides = strides
        self._messages: list[Region | slice] = []
        self._packed: list[tuple[Region, int]] = []
        self._numel = 0
        for regions, alone in zip(messages, whole, strict=True):
            if alone:
                self._messages.append(regions[0])
                continue
            start = at = -(-self._numel // _ALIGNED) * _ALIGNED
            for region in regions:
                self._packed.append((region, at))
                at += region.numel
            self._messages.append(slice(start, at))
            self._numel = at

    def room(self, tensors: Sequence[torch.Tensor]) -> Room:
        """Messages that are memory of ``tensors``, or of a new buffer of their dtype and device."""
        buffer = tensors[0].new_empty(self._numel) if self._packed else None
        messages = []
        for message in self._messages:
            if isinstance(message, Region):
                messages.append(tensors[message.tensor][message.slices])
            else:
                assert buffer is not None
                messages.append(buffer[message])
        return Room(messages, buffer)

    def places(self, buffer: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
        """Each packed box, and its place in ``buffer`` in the shape of the box."""
        for region, start in self._packed:
            yield region, buffer[start : start + region.numel].view(region.extents)

    @cached_property
    def by_kernel(self) -> PackedRegions:
        """The same for the kernel, which keeps on the device what it has to know."""
        from distconv.kernels.packing import PackedRegions

        return PackedRegions(self._packed, self._strides)


def _joined(boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    """One contiguous message; a single contiguous box goes as it is."""
    if len(boxes) > 1:
        return torch.cat([box.reshape(-1) for box in boxes])
    return boxes[0] if boxes[0].is_contiguous() else boxes[0].contiguous().view(-1)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its values in memory: torch has zeros that have none, and puts off conjugates and signs."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_conj().resolve_neg()


def _contiguous(region: Region, tensors: Sequence[torch.Tensor]) -> bool:
    return tensors[region.tensor][region.slices].is_contiguous()


def _by_kernel(tensor: torch.Tensor, adds: bool = False) -> bool:
    """Whether one kernel moves boxes of such tensors."""
    if not tensor.is_cuda:
        return False
    from distconv.kernels import packing

    return packing.available(tensor.device, tensor.dtype, tensor.dim()) and (not adds or packing.adds(tensor.dtype))

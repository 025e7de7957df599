"""Packing: copy boxes of tensors into contiguous messages, and back.

torch copies box by box. On a GPU one kernel copies all boxes at once (:mod:`distconv.kernels.packing`), if CuPy is
installed and can launch it. :mod:`.transfer` packs and unpacks; this module sends nothing.
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


class ReceiveBuffers(NamedTuple):
    """Memory for messages: each is a box of a tensor itself, or a part of ``buffer``."""

    messages: list[torch.Tensor]
    buffer: torch.Tensor | None
    """Holds the messages that must be unpacked; None if there are none."""


class Packing:
    """Messages made of boxes of some tensors.

    A message of one box that is contiguous in its tensor is that memory itself, without a copy.

    Parameters
    ----------
    messages : sequence of sequence of Region
        The boxes of each message. The shapes of the tensors never change; strides, dtype and device may.
    """

    def __init__(self, messages: Sequence[Sequence[Region]]) -> None:
        self._messages = messages
        self._layouts: dict[tuple[object, ...], _MessageLayout] = {}

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the messages.

        Parameters
        ----------
        tensors : sequence of Tensor
            The tensors that the boxes are of.

        Returns
        -------
        list of Tensor
            Contiguous. A message may share the memory of a tensor: do not change that before it was sent.
        """
        if not self._messages:
            return []
        if not _uses_kernel(tensors[0]):
            return [_concatenate([tensors[r.tensor][r.slices] for r in regions]) for regions in self._messages]
        tensors = [materialize(tensor) for tensor in tensors]
        layout = self._layout(tensors, in_place=True)
        messages, buffer = layout.allocate(tensors)
        if buffer is not None:
            # Tensors are arguments and not taken from the closure: a replay calls the function with others.
            recording.launch(lambda to, *boxes: layout.for_kernel.pack(boxes, to), buffer, *tensors)
        return messages

    def allocate_for_unpack(self, tensors: Sequence[torch.Tensor]) -> ReceiveBuffers:
        """Return memory to receive the messages into, for :meth:`unpack`.

        Parameters
        ----------
        tensors : sequence of Tensor
            The tensors that the boxes are of. Messages may be received into their memory.

        Returns
        -------
        ReceiveBuffers
        """
        return self._layout(tensors, in_place=True).allocate(tensors) if self._messages else ReceiveBuffers([], None)

    def unpack(self, received: ReceiveBuffers, tensors: Sequence[torch.Tensor]) -> None:
        """Copy received messages to their boxes.

        Parameters
        ----------
        received : ReceiveBuffers
            From :meth:`allocate_for_unpack` of the same tensors.
        tensors : sequence of Tensor
            Changed in place.
        """
        if received.buffer is None:
            return
        layout = self._layout(tensors, in_place=True)
        if _uses_kernel(tensors[0]):
            recording.launch(lambda of, *boxes: layout.for_kernel.unpack(boxes, of), received.buffer, *tensors)
            return
        for region, values in layout.packed_boxes(received.buffer):
            tensors[region.tensor][region.slices] = values

    def allocate_for_add(self, like: torch.Tensor) -> ReceiveBuffers:
        """Return memory to receive the messages into, for :meth:`add`.

        Parameters
        ----------
        like : Tensor
            Has the dtype, device and strides.

        Returns
        -------
        ReceiveBuffers
        """
        # Never into the tensor itself, whose values must be there to be added to.
        return self._layout([like], in_place=False).allocate([like]) if self._messages else ReceiveBuffers([], None)

    def add(self, received: ReceiveBuffers, tensors: Sequence[torch.Tensor]) -> None:
        """Add received messages to their boxes, in the order of the messages.

        Parameters
        ----------
        received : ReceiveBuffers
            From :meth:`allocate_for_add`.
        tensors : sequence of Tensor
            Changed in place.
        """
        if received.buffer is None:
            return
        layout = self._layout(tensors, in_place=False)
        if _uses_kernel(tensors[0], adds=True):
            recording.launch(lambda of, *boxes: layout.for_kernel.add(boxes, of), received.buffer, *tensors)
            return
        for region, values in layout.packed_boxes(received.buffer):
            tensors[region.tensor][region.slices] += values

    def _layout(self, tensors: Sequence[torch.Tensor], *, in_place: bool) -> _MessageLayout:
        # Shapes never change, but strides may: in channels-last tensors other boxes are contiguous.
        strides = tuple(tensor.stride() for tensor in tensors)
        layout = self._layouts.get((in_place, strides))
        if layout is None:
            unbuffered = [
                in_place and len(regions) == 1 and tensors[regions[0].tensor][regions[0].slices].is_contiguous()
                for regions in self._messages
            ]
            layout = self._layouts[in_place, strides] = _MessageLayout(self._messages, unbuffered, strides)
        return layout


class _MessageLayout:
    """Positions of the boxes of messages in their buffer, for tensors with given strides.

    ``unbuffered``: for each message True if it is the memory of its one box, so that nothing is copied. Otherwise it is
    in the buffer.
    """

    def __init__(
        self, messages: Sequence[Sequence[Region]], unbuffered: Sequence[bool], strides: Sequence[tuple[int, ...]]
    ) -> None:
        self._strides = strides
        self._messages: list[Region | slice] = []
        self._packed: list[tuple[Region, int]] = []
        self._numel = 0
        for regions, is_unbuffered in zip(messages, unbuffered, strict=True):
            if is_unbuffered:
                self._messages.append(regions[0])
                continue
            start = at = -(-self._numel // _ALIGNED) * _ALIGNED
            for region in regions:
                self._packed.append((region, at))
                at += region.numel
            self._messages.append(slice(start, at))
            self._numel = at

    def allocate(self, tensors: Sequence[torch.Tensor]) -> ReceiveBuffers:
        """Return the messages: memory of ``tensors``, or of a new buffer of their dtype and device."""
        buffer = tensors[0].new_empty(self._numel) if self._packed else None
        messages = []
        for message in self._messages:
            if isinstance(message, Region):
                messages.append(tensors[message.tensor][message.slices])
            else:
                assert buffer is not None
                messages.append(buffer[message])
        return ReceiveBuffers(messages, buffer)

    def packed_boxes(self, buffer: torch.Tensor) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yield each packed box and its values in ``buffer``, in the shape of the box."""
        for region, start in self._packed:
            yield region, buffer[start : start + region.numel].view(region.extents)

    @cached_property
    def for_kernel(self) -> PackedRegions:
        """The same positions for the kernel, which keeps them on the device."""
        from distconv.kernels.packing import PackedRegions

        return PackedRegions(self._packed, self._strides)


def _concatenate(boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one contiguous message; a single contiguous box is not copied."""
    if len(boxes) > 1:
        return torch.cat([box.reshape(-1) for box in boxes])
    return boxes[0] if boxes[0].is_contiguous() else boxes[0].contiguous().view(-1)


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values.

    MPI reads memory, but some zeros of torch have none, and torch defers conjugation and negation until an operator
    reads the values.

    Parameters
    ----------
    tensor : Tensor
        Any tensor.

    Returns
    -------
    Tensor
        ``tensor`` itself if its memory holds its values.
    """
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_conj().resolve_neg()


def _uses_kernel(tensor: torch.Tensor, adds: bool = False) -> bool:
    """Return True if one kernel copies, or ``adds``, all boxes of such tensors."""
    if not tensor.is_cuda:
        return False
    from distconv.kernels import packing

    available = packing.is_available(tensor.device, tensor.dtype, tensor.dim())
    return available and (not adds or packing.can_add(tensor.dtype))

"""Header of a message between stages: the pass that it belongs to, and the tensors that follow.

All headers have the same length, so that a receive can be posted before the shapes are known::

    [is gradient, micro-batch, part, step, samples, needs gradient, loss, bytes, tensors]    9 numbers, for each tensor:
    [dtype, dimensions, *shape, number of strides, *strides]                                 dtype -1: no tensor, then
    [length, *bytes]                                                                         structure of the tensors
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distconv.errors import PipelineError
from distconv.pipeline.schedules.actions import Kind, Message
from distconv.pipeline.stage.stage_inputs import Minibatch
from distconv.pipeline.stage.structures import Leaf

HEADER = 512
"""Length of a header, in int64 numbers."""

HEADER_BYTES = 8 * HEADER
# A dtype is sent as its position here, so all ranks must have the same order.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a message.

    Attributes
    ----------
    dtype : dtype or None
        None: there is no tensor (such as a missing gradient).
    shape : tuple of int
        Global shape.
    strides : tuple of int
        Strides of a clone, for a tensor that goes from one rank to one rank. The receiver then has the memory format of
        a single process, and so the same bits. Empty: contiguous.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @staticmethod
    def from_tensor(value: torch.Tensor | None, strided: bool) -> TensorHeader:
        """Return the header of a tensor, with its strides if ``strided``.

        Parameters
        ----------
        value : Tensor or None
            The tensor.
        strided : bool
            True to include the strides. Otherwise the tensor is contiguous.

        Returns
        -------
        TensorHeader
        """
        if value is None:
            return TensorHeader(None)
        return TensorHeader(value.dtype, tuple(value.shape), strides_of(value) if strided else ())


@dataclass(frozen=True)
class MessageHeader:
    """Header of a message.

    Attributes
    ----------
    message : Message
        Pass to which it belongs.
    minibatch : Minibatch
    tensors : tuple of TensorHeader
    loss : float
        NaN if unknown.
    nbytes : int
        Bytes of the tensors, as laid out for one pair of ranks.
    structure : object
        Structure around the tensors.
    """

    message: Message
    minibatch: Minibatch
    tensors: tuple[TensorHeader, ...]
    loss: float = math.nan
    nbytes: int = 0
    structure: Any = Leaf.FLAT

    def encode(self) -> torch.Tensor:
        """Return the header as ``HEADER`` numbers of dtype int64.

        Raises
        ------
        PipelineError
            If there are too many tensors, their structure is too large, or a dtype cannot be sent.
        """
        payload, microbatch, part = self.message
        loss = int(np.float64(self.loss).view(np.int64))  # the bits, so that the loss is the same on all ranks
        numbers = [int(payload is Kind.B), microbatch, part, *self.minibatch, loss, self.nbytes, len(self.tensors)]
        for each in self.tensors:
            if each.dtype is not None and each.dtype not in DTYPES:
                raise PipelineError(f"a tensor of {each.dtype} cannot be sent between stages; convert it")
            code = -1 if each.dtype is None else DTYPES.index(each.dtype)
            numbers += [code, len(each.shape), *each.shape, len(each.strides), *each.strides]
        encoded = b"" if self.structure is Leaf.FLAT else pickle.dumps(self.structure)
        numbers.append(len(encoded))
        numbers += np.frombuffer(encoded + bytes(-len(encoded) % 8), np.int64).tolist()
        if len(numbers) > HEADER:
            raise PipelineError(
                f"{len(self.tensors)} tensors in a structure of {len(encoded)} bytes are sent between two stages, more "
                f"than a message header of {HEADER_BYTES} bytes can describe; return fewer tensors, names and constants"
            )
        # With an explicit device: the default device may be a GPU.
        return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64, device="cpu")

    @staticmethod
    def decode(numbers: Sequence[int]) -> MessageHeader:
        """Return the header that :meth:`encode` wrote."""
        backward, microbatch, part, step, samples, needs_gradient, loss, nbytes, count = numbers[:9]
        tensors, at = [], 9
        for _ in range(count):
            code, dims = numbers[at : at + 2]
            end = at + 2 + dims
            after = end + 1 + numbers[end]
            shape, strides = tuple(numbers[at + 2 : end]), tuple(numbers[end + 1 : after])
            tensors.append(TensorHeader(DTYPES[code] if code >= 0 else None, shape, strides))
            at = after
        # The bytes come from another rank of this job, which runs the same program.
        encoded = np.asarray(numbers[at + 1 :], np.int64).tobytes()[: numbers[at]]
        return MessageHeader(
            Message(Kind.B if backward else Kind.F, microbatch, part),
            Minibatch(step, samples, bool(needs_gradient)),
            tuple(tensors),
            float(np.int64(loss).view(np.float64)),
            nbytes,
            pickle.loads(encoded) if encoded else Leaf.FLAT,
        )


def strides_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a clone.

    They are those of ``value`` if it fills its memory, otherwise dense in the same order of dimensions.
    """
    return torch.empty_like(value, device="meta").stride()

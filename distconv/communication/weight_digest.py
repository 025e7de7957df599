"""Digests of weights that ride with the sums of their gradients: copies that come apart are noticed in a step or a few.

A rank that skips an update, or gets another one, computes something else from then on, and no error follows from it.
Each rank appends to a bucket of gradients a digest d of the bucket's weights, cut into pieces, and the square of each
piece. By Cauchy and Schwarz, p sums of d^2 are the square of the sum of d only if d is the same on all p ranks. The
pieces are so short that these sums are exact in float32, hence the same on all ranks, which come to the same verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv import recording
from distconv.communication.digest import difference
from distconv.errors import MismatchError

WHOLE, TURNS = 4096, 10
"""A weight of more elements has its turn in so many parts."""

_LONG, _ALIGNED = 1024, 16
"""Longer parts are summed where they are; parts begin at multiples of so many elements."""

_BITS = 32
"""Of the digest that rides."""

_MIXING = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd multiplier, after which the upper bits depend on all bits. XOR of the halves would be 0 where they are equal."""

_EXACT = 24
"""Bits of an integer that float32 holds."""


def _piece_bits(ranks: int) -> int:
    return (_EXACT - (ranks - 1).bit_length()) // 2


def length(ranks: int) -> int:
    """How many numbers ride."""
    return 2 * -(-_BITS // _piece_bits(ranks))


def riders(weights: Sequence[torch.Tensor], turn: int, ranks: int) -> torch.Tensor:
    """What rides for ``weights``: the pieces of the digest of those parts whose turn it is, and their squares.

    ``weights`` are of one dtype. float32, 2 x pieces; computed where the weights are, without waiting for a GPU.
    """
    return digests_of(*parts_of(weights, turn), ranks)


def parts_of(weights: Sequence[torch.Tensor], turn: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Those parts of ``weights`` whose turn it is, as views: short ones, which are filled up, and long ones."""
    parts = [part(weight, turn) for weight in weights]
    long = [values for values in parts if values.numel() > _LONG and _is_of_words(values)]
    short = [values for values in parts if values.numel() <= _LONG or not _is_of_words(values)]
    # Filled up to whole words of 64 bits, which torch sums at the speed of memory; copying takes longer than that.
    short.append(parts[0].new_zeros(-sum(values.numel() for values in short) % _per_word(parts[0])))
    return short, long


def digests_of(short: list[torch.Tensor], long: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """The pieces of the digest of parts, and their squares."""
    # The sum of many equal words lacks their upper bits, so those of short parts, such as scales, are mixed one by one.
    words = torch.stack([_mixed(torch.cat(short).view(torch.int64)).sum(), *(x.view(torch.int64).sum() for x in long)])
    bits = _piece_bits(ranks)
    digest = _mixed(words.sum())
    pieces = (digest >> torch.arange(0, _BITS, bits, device=digest.device)) & ((1 << bits) - 1)
    return torch.cat([pieces, pieces.square()]).float()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    return (words * _MIXING) >> _BITS


def _per_word(values: torch.Tensor) -> int:
    return max(1, 8 // values.element_size())


def _is_of_words(values: torch.Tensor) -> bool:
    per_word = _per_word(values)
    return values.storage_offset() % per_word == 0 and values.numel() % per_word == 0


def part(weight: torch.Tensor, turn: int) -> torch.Tensor:
    """The elements of ``weight`` that are looked at in a turn: after ``TURNS`` of them it was all of them."""
    values = weight.detach()
    if not values.is_contiguous():
        # In the order of memory, where nothing has to be copied.
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
    flat = values.reshape(-1)
    if flat.numel() <= WHOLE:
        return flat
    length = -(-flat.numel() // (TURNS * _ALIGNED)) * _ALIGNED
    begin = turn % TURNS * length
    return flat[begin : begin + length]


def alike(sums: Sequence[float], ranks: int) -> bool:
    """Whether the digests were the same on all ``ranks``, by the sums of what rode."""
    pieces, squares = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    return all(ranks * int(square) == int(piece) ** 2 for piece, square in zip(pieces, squares, strict=True))


class Comparison:
    """The verdict about some weights, once the sums are there."""

    def __init__(self, comm: MPI.Intracomm, weights: Sequence[torch.Tensor], names: Sequence[str], sums: torch.Tensor):
        self._comm, self._weights = comm, dict(zip(names, weights, strict=True))
        self.late = sums.is_cuda
        """Whether it is to be made in the next backward pass: now it would wait for the GPU."""
        self._sums = sums.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(sums.device).record_event() if sums.is_cuda else None

    def check(self) -> None:
        """Raise MismatchError on all ranks if the weights were not the same on them. Collective only then.

        Raises
        ------
        MismatchError
            Naming the first weight that differs, and the ranks that have each value.
        """
        if self._copied is not None:
            self._copied.synchronize()
        recording.call(self._compare, self._sums)

    def _compare(self, sums: torch.Tensor) -> None:
        if not alike(sums.tolist(), self._comm.size):
            text = difference(self._comm, self._weights, MPI.COMM_WORLD.rank)
            raise MismatchError(text or "weights differed between ranks in the last step and do not any more")

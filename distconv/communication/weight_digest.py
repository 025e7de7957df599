"""Checksums of weights, piggybacked on the gradient all-reduce. They find diverging replicas in a few steps.

A rank that skips an update, or makes a different one, computes something else from then on, without any error.
Therefore :mod:`.gradient_reduction` appends to each bucket of gradients the checksum payload of the bucket's weights:

1. A digest of 32 bits is computed from the weights; of a large weight, from one of :data:`ROUNDS` chunks in each pass.
2. The digest is cut into pieces of so few bits that sums of their squares over all ranks are exact in float32.
3. The payload holds the pieces d and their squares d^2. The all-reduce sums them with the gradients.
4. By the Cauchy-Schwarz inequality, p times the sum of d^2 over p ranks equals the square of the sum of d only if d is
   the same on all ranks. The sums are exact, so all ranks come to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mpi4py import MPI

from distconv import recording
from distconv.communication.digest import describe_difference
from distconv.errors import MismatchError

UNSPLIT_ELEMENTS = 4096
"""Weights of at most this many elements are digested completely in each pass."""

ROUNDS = 10
"""Number of chunks of a larger weight. Each pass takes the next one, so a difference is found after at most so many."""

_LONG = 1024
"""Chunks of more elements are summed in place. Shorter ones are concatenated first: fewer calls of torch."""

_ALIGNED = 16
"""Chunks begin at multiples of this many elements."""

_BITS = 32
"""Bits of the digest."""

_MIXING = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd multiplier, after which the upper bits depend on all bits. An XOR of the halves would be 0 if they are equal."""

_EXACT_BITS = 24
"""Bits of the largest integers that float32 represents exactly."""


def _piece_bits(ranks: int) -> int:
    """Return the bits of a piece such that the sum of its squares over all ranks is exact in float32."""
    return (_EXACT_BITS - (ranks - 1).bit_length()) // 2


def payload_length(ranks: int) -> int:
    """Return the number of elements of the payload.

    Parameters
    ----------
    ranks : int
        Number of ranks over which it is summed.

    Returns
    -------
    int
        Twice the number of pieces of the digest.
    """
    return 2 * -(-_BITS // _piece_bits(ranks))


def checksum_payload(weights: Sequence[torch.Tensor], round_index: int, ranks: int) -> torch.Tensor:
    """Return the payload for some weights: the pieces of their digest, and the squares of the pieces.

    Parameters
    ----------
    weights : sequence of Tensor
        Of one dtype and device.
    round_index : int
        Number of the pass, which selects the chunks of large weights; the same on all ranks.
    ranks : int
        Number of ranks over which the payload is summed.

    Returns
    -------
    Tensor
        float32, shape (``payload_length(ranks)``,), on the device of the weights. The host does not wait for a GPU.
    """
    return digest_chunks(*select_chunks(weights, round_index), ranks)


def select_chunks(weights: Sequence[torch.Tensor], round_index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the chunks of some weights that a round compares.

    Parameters
    ----------
    weights, round_index
        As in :func:`checksum_payload`.

    Returns
    -------
    short, long : list of Tensor
        Views of the weights, of one dimension. ``short`` ends with zeros that fill it up to whole words of 64 bits.
    """
    chunks = [select_chunk(weight, round_index) for weight in weights]
    long = [values for values in chunks if values.numel() > _LONG and _has_whole_words(values)]
    short = [values for values in chunks if values.numel() <= _LONG or not _has_whole_words(values)]
    # torch sums words of 64 bits at the speed of memory, and copies more slowly than that.
    short.append(chunks[0].new_zeros(-sum(values.numel() for values in short) % _per_word(chunks[0])))
    return short, long


def digest_chunks(short: list[torch.Tensor], long: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """Return the payload for the chunks that :func:`select_chunks` returned.

    Parameters
    ----------
    short, long : list of Tensor
        The chunks.
    ranks : int
        As in :func:`checksum_payload`.

    Returns
    -------
    Tensor
        As in :func:`checksum_payload`.
    """
    # The sum of many equal words lacks their upper bits. So short chunks, which are often constant (such as the scales
    # of a batch norm), are mixed word by word.
    words = torch.stack([_mix(torch.cat(short).view(torch.int64)).sum(), *(x.view(torch.int64).sum() for x in long)])
    bits = _piece_bits(ranks)
    digest = _mix(words.sum())
    pieces = (digest >> torch.arange(0, _BITS, bits, device=digest.device)) & ((1 << bits) - 1)
    return torch.cat([pieces, pieces.square()]).float()


def _mix(words: torch.Tensor) -> torch.Tensor:
    return (words * _MIXING) >> _BITS


def _per_word(values: torch.Tensor) -> int:
    return max(1, 8 // values.element_size())


def _has_whole_words(values: torch.Tensor) -> bool:
    per_word = _per_word(values)
    return values.storage_offset() % per_word == 0 and values.numel() % per_word == 0


def select_chunk(weight: torch.Tensor, round_index: int) -> torch.Tensor:
    """Return the elements of a weight that a round compares. Successive :data:`ROUNDS` rounds cover all elements.

    Parameters
    ----------
    weight : Tensor
        Any shape.
    round_index : int
        Number of the pass.

    Returns
    -------
    Tensor
        One dimension; a view, unless the memory of the weight has gaps.
    """
    values = weight.detach()
    if not values.is_contiguous():
        # In the order of memory, in which nothing has to be copied.
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
    flat = values.reshape(-1)
    if flat.numel() <= UNSPLIT_ELEMENTS:
        return flat
    length = -(-flat.numel() // (ROUNDS * _ALIGNED)) * _ALIGNED
    begin = round_index % ROUNDS * length
    return flat[begin : begin + length]


def is_same_on_all_ranks(sums: Sequence[float], ranks: int) -> bool:
    """Return True if the digests were the same on all ranks.

    Parameters
    ----------
    sums : sequence of float
        The payload, summed over the ranks.
    ranks : int
        Number of ranks.
    """
    pieces, squares = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    return all(ranks * int(square) == int(piece) ** 2 for piece, square in zip(pieces, squares, strict=True))


class WeightComparison:
    """Comparison of some weights between ranks, given the summed payload.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks over which the payload was summed.
    weights : sequence of Tensor
        The weights.
    names : sequence of str
        Their names in errors.
    sums : Tensor
        float32, the payload summed over the ranks.
    """

    def __init__(self, comm: MPI.Intracomm, weights: Sequence[torch.Tensor], names: Sequence[str], sums: torch.Tensor):
        self._comm, self._weights = comm, dict(zip(names, weights, strict=True))
        self.is_deferred = sums.is_cuda
        """True if the check belongs to the next backward pass, since now the host would wait for the GPU.

        Otherwise the check can be made at once.
        """
        self._sums = sums.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(sums.device).record_event() if sums.is_cuda else None

    def check(self) -> None:
        """Check that the weights are the same on all ranks. Communicates only if they are not.

        Raises
        ------
        MismatchError
            On every rank, with the first weight that differs and the ranks of each version.
        """
        if self._copied is not None:
            self._copied.synchronize()
        recording.call(self._compare, self._sums)

    def _compare(self, sums: torch.Tensor) -> None:
        # The sums are identical on all ranks, so either all of them enter the collective comparison, or none.
        if not is_same_on_all_ranks(sums.tolist(), self._comm.size):
            text = describe_difference(self._comm, self._weights, MPI.COMM_WORLD.rank)
            raise MismatchError(text or "weights differed between ranks in the last step, but they are equal now")

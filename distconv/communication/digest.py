"""Digests of tensors, with which ranks detect that their copies differ.

:func:`digest` identifies values, :func:`checksum` is ten times as fast and misses some permutations.
:func:`find_differing` and :func:`describe_difference` compare many tensors over a communicator.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from mpi4py import MPI

from distconv.communication.agreement import find_mismatches
from distconv.process import watchdog


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a plain tensor as bytes, in the order of its indices.

    Parameters
    ----------
    tensor : Tensor
        Any shape, dtype, strides and device.

    Returns
    -------
    ndarray of uint8
        One dimension. It may share the memory of ``tensor``.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # A tensor of one element counts as contiguous whatever its stride, but cannot be viewed as bytes then. And memory
    # that NumPy has seen cannot be resized any more, which an observer does with its empty buffers.
    flat = flat.clone(memory_format=torch.contiguous_format) if flat.numel() <= 1 else flat
    return flat.view(torch.uint8).numpy()


def digest(tensor: torch.Tensor) -> int:
    """Return a hash of the values of a tensor.

    Parameters
    ----------
    tensor : Tensor
        Any shape, dtype, strides and device.

    Returns
    -------
    int
        56 bits; fits into an int64, as does its negative.
    """
    # 7 bytes: find_mismatches negates the number as an int64.
    return int.from_bytes(hashlib.blake2b(to_bytes(tensor).tobytes(), digest_size=7).digest(), "little")


def checksum(tensor: torch.Tensor) -> int:
    """Return a hash of the sum of the 64-bit words of a tensor and of its first values.

    Ten times as fast as :func:`digest`. Different values almost always have different checksums, but the same words in
    another order have the same one, unless they are among the first.

    Parameters
    ----------
    tensor : Tensor
        Any shape, dtype, strides and device.

    Returns
    -------
    int
        56 bits, as in :func:`digest`.
    """
    # With torch, not NumPy: FSDP could not free memory that NumPy has seen.
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    # torch views bytes as 64-bit words only at an aligned offset.
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    total = int(words.view(torch.int64).sum())
    # The sum of 4096 equal words lacks the upper 12 bits of each. Without the first values, constant tensors of
    # different values would have the same checksum.
    seen = total.to_bytes(8, "little", signed=True) + bytes(flat[:64].tolist()) + bytes(flat[whole:].tolist())
    return int.from_bytes(hashlib.blake2b(seen, digest_size=7).digest(), "little")


def find_differing(
    comm: MPI.Intracomm,
    tensors: Mapping[str, torch.Tensor],
    what: str,
    summary: Callable[[torch.Tensor], int] = digest,
) -> dict[str, int]:
    """Find the tensors that are not bitwise identical on all ranks.

    Collective: call on every rank. One allreduce of 16 bytes for each tensor.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks to compare.
    tensors : mapping of str to Tensor
        This rank's tensors. All ranks have the same names in the same order.
    what : str
        The wait that the watchdog reports.
    summary : callable
        :func:`digest` or :func:`checksum`.

    Returns
    -------
    dict of str to int
        The names of the tensors that differ, identical on all ranks, and their digests on this rank.
    """
    # The number of tensors is the same on all ranks, so one all-reduce compares all of them.
    digests = np.array([summary(tensor) for tensor in tensors.values()], dtype=np.int64)
    differs = find_mismatches(comm, digests, lambda: what)
    return {name: int(value) for name, value, wrong in zip(tensors, digests, differs, strict=True) if wrong}


def describe_difference(
    comm: MPI.Intracomm,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    summary: Callable[[torch.Tensor], int] = digest,
) -> str:
    """Describe which tensors differ between ranks.

    Collective: call on every rank.

    Parameters
    ----------
    comm, tensors, summary
        As in :func:`find_differing`.
    rank : int
        The number of this rank in the message.

    Returns
    -------
    str
        A sentence that names the first tensor that differs and the ranks of each version, identical on all ranks.
        Empty if no tensor differs.
    """
    wrong = find_differing(comm, tensors, "comparing replicas", summary)
    if not wrong:
        return ""
    first = next(iter(wrong))
    with watchdog.waiting(lambda: "comparing replicas"):
        everyone = comm.allgather((rank, wrong[first]))
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for number, value in everyone:
        ranks_of[value].append(number)
    versions = ", another ".join(f"one on rank {', '.join(map(str, ranks))}" for ranks in ranks_of.values())
    return (
        f"{len(wrong)} of {len(tensors)} parameters and buffers are no longer the same on all ranks, the first is "
        f"{first!r}: {versions}. Change weights in the same way on all ranks, with the same seed, and resume from a "
        "checkpoint; on GPUs nondeterministic kernels make weights differ, too (torch.use_deterministic_algorithms)"
    )

"""Digests of tensors, by which ranks find out that theirs differ."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from mpi4py import MPI

from distconv.communication.agreement import find_mismatches
from distconv.process import watchdog


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a plain tensor, in the order of its indices, as they are in memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # One element counts as contiguous whatever its stride, but cannot be seen as bytes then; and memory that NumPy has
    # seen cannot grow any more, as an observer's empty buffers do.
    flat = flat.clone(memory_format=torch.contiguous_format) if flat.numel() <= 1 else flat
    return flat.view(torch.uint8).numpy()


def digest(tensor: torch.Tensor) -> int:
    """56 bits that tell its values apart."""
    return int.from_bytes(hashlib.blake2b(bytes_of(tensor).tobytes(), digest_size=7).digest(), "little")


def checksum(tensor: torch.Tensor) -> int:
    """Return 56 bits of the sum of the 64-bit words of a tensor and of its first values.

    Ten times as fast as :func:`digest`. Other values almost always change it, but the same words in another order do
    not, unless they are among the first.
    """
    # By torch: FSDP could not free memory that NumPy has seen.
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    total = int(words.view(torch.int64).sum())
    # The sum of 4096 equal words lacks the upper 12 bits of each: constants would have the same one.
    seen = total.to_bytes(8, "little", signed=True) + bytes(flat[:64].tolist()) + bytes(flat[whole:].tolist())
    return int.from_bytes(hashlib.blake2b(seen, digest_size=7).digest(), "little")


def different(
    comm: MPI.Intracomm,
    tensors: Mapping[str, torch.Tensor],
    what: str,
    summary: Callable[[torch.Tensor], int] = digest,
) -> dict[str, int]:
    """This rank's digests of those ``tensors`` that are not the same, bit for bit, on all ranks. Collective.

    One message of 16 bytes for each. ``summary`` is :func:`digest` or :func:`checksum`.
    """
    digests = np.array([summary(tensor) for tensor in tensors.values()], dtype=np.int64)
    differs = find_mismatches(comm, digests, lambda: what)
    return {name: int(value) for name, value, wrong in zip(tensors, digests, differs, strict=True) if wrong}


def difference(
    comm: MPI.Intracomm,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    summary: Callable[[torch.Tensor], int] = digest,
) -> str:
    """Which copies differ between the ranks of ``comm``, as a sentence; empty if none does. Collective.

    ``rank``: this one as users know it. ``summary`` is :func:`digest` or :func:`checksum`.
    """
    wrong = different(comm, tensors, "comparing replicas", summary)
    if not wrong:
        return ""
    first = next(iter(wrong))
    with watchdog.waiting(lambda: "comparing replicas"):
        versions = _ranks_by_version(comm.allgather((rank, wrong[first])))
    return (
        f"{len(wrong)} of {len(tensors)} parameters and buffers are no longer the same on all ranks, the first is "
        f"{first!r}: {versions}. Change weights in the same way on all ranks, with the same seed, and resume from a "
        "checkpoint; on GPUs nondeterministic kernels make weights differ, too (torch.use_deterministic_algorithms)"
    )


def _ranks_by_version(values: Sequence[tuple[int, int]]) -> str:
    versions: dict[int, list[int]] = defaultdict(list)
    for rank, value in values:
        versions[value].append(rank)
    listed = (f"one on rank {', '.join(map(str, ranks))}" for ranks in versions.values())
    return ", another ".join(listed)

"""Random numbers that depend on the work alone, not on the schedule or the rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def seed_generators(
    seed: int, minibatch: int, microbatch: int, stage: int, devices: Sequence[torch.device] = ()
) -> Iterator[None]:
    """Seed torch's generators for one forward pass, and restore them when the block ends.

    The same arguments give the same numbers, so a repeated forward pass drops out the same activations. The generators
    are those of the CPU and of the given CUDA devices.

    Parameters
    ----------
    seed : int
        Seed of the run.
    minibatch, microbatch, stage : int
        Work of the forward pass.
    devices : sequence of device
        CUDA devices.

    Yields
    ------
    None

    Examples
    --------
    >>> with seed_generators(0, 5, 1, 2):
    ...     first = torch.rand(3)
    >>> with seed_generators(0, 5, 1, 2):
    ...     print(torch.equal(torch.rand(3), first))
    True
    """
    indices = [torch.cuda.current_device() if device.index is None else device.index for device in devices]
    # 63 bits that depend on all four numbers, and are the same on every machine.
    digest = hashlib.blake2b(repr((seed, minibatch, microbatch, stage)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "big") >> 1
    with torch.random.fork_rng(indices, device_type="cuda"):
        torch.default_generator.manual_seed(value)  # torch.manual_seed would change devices that are not restored
        for index in indices:
            torch.cuda.default_generators[index].manual_seed(value)
        yield

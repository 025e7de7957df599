"""Random numbers that depend on the work alone: not on the schedule, nor on which rank does it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def seeded(
    seed: int, minibatch: int, microbatch: int, stage: int, devices: Sequence[torch.device] = ()
) -> Iterator[None]:
    """Within it torch's generators begin anew for one forward pass; afterwards they are as they were before.

    CPU, and the CUDA ``devices`` given. The same numbers again for the same ``seed``, ``minibatch``, ``microbatch`` and
    ``stage``: a forward that is run a second time drops out the same activations.

    >>> with seeded(0, 5, 1, 2):
    ...     first = torch.rand(3)
    >>> with seeded(0, 5, 1, 2):
    ...     print(torch.equal(torch.rand(3), first))
    True
    """
    indices = [torch.cuda.current_device() if device.index is None else device.index for device in devices]
    value = _value(seed, minibatch, microbatch, stage)
    with torch.random.fork_rng(indices, device_type="cuda"):
        torch.default_generator.manual_seed(value)  # torch.manual_seed would change devices that are not restored
        for index in indices:
            torch.cuda.default_generators[index].manual_seed(value)
        yield


def _value(*numbers: int) -> int:
    """63 bits in which every one of ``numbers`` counts; the same on every machine."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

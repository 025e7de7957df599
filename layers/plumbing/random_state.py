"""Generators of random numbers: whether they stand where those of the other ranks do, and whether a call has drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from distconv import recording
from distconv.communication import agreement
from distconv.errors import MismatchError
from distconv.tensor import DistTensor


def random_states(device: torch.device, generators: Iterable[torch.Generator]) -> list[bytes]:
    """Where the default generator, that of ``device``, and ``generators`` stand."""
    with recording.paused():
        states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return [state.numpy().tobytes() for state in states]


def agree_on_generator(input: DistTensor, generator: torch.Generator | None = None) -> None:
    """Raise MismatchError on all ranks if their next random numbers would differ.

    Raises
    ------
    MismatchError
        On all ranks, if the generators differ.
    """
    if input.grid.size == 1 or agreement.level == "off":
        return
    with recording.paused():
        if generator is not None:
            state = generator.get_state()
        else:
            state = torch.cuda.get_rng_state(input.device) if input.is_cuda else torch.get_rng_state()
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=6).hexdigest()
    try:
        agreement.check_same_on_all_ranks(input.grid.world, "random generator", f"state {digest}")
    except MismatchError as error:
        raise MismatchError(f"{error}: seed all ranks alike (torch.manual_seed)") from None

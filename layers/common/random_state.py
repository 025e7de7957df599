"""States of random generators: comparison between ranks, and detection of draws.

Called by dropout, the fallback and other operators whose results depend on random numbers. Their results are correct
only if all ranks draw the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from distconv import recording
from distconv.communication import agreement
from distconv.tensor import DistTensor


def random_states(device: torch.device, generators: Iterable[torch.Generator]) -> list[bytes]:
    """Return the states of the default generator, the generator of a device, and further generators.

    Parameters
    ----------
    device : torch.device
    generators : iterable of torch.Generator

    Returns
    -------
    list of bytes
        Two lists are equal if no generator was used between the calls.
    """
    # A captured step must not record these reads: a replay would compare the states of the recording.
    with recording.paused():
        states = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return [state.numpy().tobytes() for state in states]


def check_same_generator_state(input: DistTensor, generator: torch.Generator | None = None) -> None:
    """Check that all ranks will draw the same random numbers.

    Collective: call on every rank. ``DISTCONV_CHECK=off`` skips the comparison.

    Parameters
    ----------
    input : DistTensor
        Determines the ranks and the device's default generator.
    generator : torch.Generator, optional
        The generator to compare instead of the default one.

    Raises
    ------
    MismatchError
        On all ranks, if the states differ.
    """
    if input.grid.size == 1 or agreement.level == "off":
        return
    with recording.paused():
        if generator is not None:
            state = generator.get_state()
        else:
            state = torch.cuda.get_rng_state(input.device) if input.is_cuda else torch.get_rng_state()
        # The state has kilobytes (CPU: 5 KB); a digest keeps the message and the error short.
        digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=6).hexdigest()
    fix = "seed all ranks identically (torch.manual_seed)"
    agreement.check_same_on_all_ranks(input.grid.world, "random generator", f"state {digest}", fix)

"""Detection of reads and changes of state that call no operator of torch.

While a step is recorded, these functions and attributes of torch are replaced. They report to the recorder that values
leave torch, that a gradient is used, or that the random generator is read or set. :mod:`.run` calls this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from distconv.capture.gradients import SavedGradients
from distconv.capture.recorder import StepRecorder

_VALUE_READERS = ("tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "apply_", "map_", "map2_")
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


@contextmanager
def report_accesses(recorder: StepRecorder, gradients: SavedGradients) -> Iterator[None]:
    """Report accesses to torch's state by this thread in a ``with`` block.

    Parameters
    ----------
    recorder : StepRecorder
        Receives unsupported accesses, and uses of the random generator.
    gradients : SavedGradients
        Receives each leaf before its ``grad`` is used.

    Yields
    ------
    None
    """
    # Torch lists its own getters at their first use and keeps the list. It must not contain the replaced ones.
    torch.overrides.get_default_nowrap_functions()
    with ExitStack() as stack:
        for owner, name, new in _replacements(recorder, gradients):
            stack.enter_context(patch.object(owner, name, new))
        yield


def _replacements(recorder: StepRecorder, gradients: SavedGradients) -> Iterator[tuple[Any, str, Any]]:
    thread = threading.get_ident()

    def is_recorded() -> bool:
        # Other threads, such as a data loader's, are not recorded: they do the same in replays.
        return not recorder.paused and threading.get_ident() == thread

    def reporting(reason: str, function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_recorded():
                recorder.mark_unsupported(reason)
            return function(*args, **kwargs)

        return call

    for name in _VALUE_READERS:
        reason = f"a value is read in Python ({name.strip('_')}(), perhaps for NumPy, a print or a message)"
        yield torch.Tensor, name, reporting(reason, getattr(torch.Tensor, name))
    # The installed setter, not torch's own: distconv may have replaced it, so that a plain tensor can be set to a
    # distributed one.
    set_data = vars(torch.Tensor).get("data", _DATA).__set__
    reason = "the memory of a tensor is replaced (x.data = y)"
    yield torch.Tensor, "data", property(_DATA.__get__, reporting(reason, set_data))

    def adding_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            if is_recorded() and tensor.is_leaf:
                # A leaf is added before its gradient is read or set: its gradient from before the step must be known.
                gradients.add(tensor)
            return function(tensor, *args)

        return call

    yield (
        torch.Tensor,
        "grad",
        property(adding_leaf(_GRAD.__get__), adding_leaf(_GRAD.__set__), adding_leaf(_GRAD.__delete__)),
    )
    get_state, set_state, seed = torch.random.get_rng_state, torch.random.set_rng_state, torch.random.manual_seed

    def call_in_replays(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        if not is_recorded():
            return function(*tensors)
        recorder.save_generator(torch.default_generator)
        return recorder.call(function, tensors)

    def manual_seed(number: int) -> torch.Generator:
        def set_seed() -> None:  # without a result, which the recorder would take for a tensor
            seed(number)

        call_in_replays(set_seed)
        return torch.default_generator

    # Both modules have a reference of their own to these functions.
    for owner in (torch, torch.random):
        yield owner, "get_rng_state", partial(call_in_replays, get_state)
        yield owner, "set_rng_state", partial(call_in_replays, set_state)
        yield owner, "manual_seed", manual_seed

"""What no operator is called for: gradients that are looked at, values that leave torch, generators that are set.

And batches that are fetched. While a step is recorded, the few functions of torch by which this is done are others, and
tell the recorder.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from distconv.capture.recorder import Recorder

_LEAVES = ("tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "apply_", "map_", "map2_")
"""Methods by which values leave torch without a call of an operator."""

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


@contextmanager
def seen(recorder: Recorder) -> Iterator[None]:
    """Inside, ``recorder`` is told."""
    # Torch lists its own getters once, when it first wants them, which may be inside (torch._dynamo, loaded there).
    torch.overrides.get_default_nowrap_functions()
    drawn = _pythons_numbers()
    with ExitStack() as stack:
        for owner, name, new in _replacements(recorder):
            stack.enter_context(patch.object(owner, name, new))
        yield
    if _pythons_numbers() != drawn:
        recorder.refuse("random numbers are drawn from Python's or NumPy's generator", "the step")


def _replacements(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    thread = threading.get_ident()

    def here() -> bool:
        return not recorder.paused and threading.get_ident() == thread

    def refusing(reason: str, function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if here():
                recorder.refuse(reason)
            return function(*args, **kwargs)

        return call

    for name in _LEAVES:
        reason = f"values leave torch ({name.strip('_')}(), perhaps for NumPy, a print or a message)"
        yield torch.Tensor, name, refusing(reason, getattr(torch.Tensor, name))
    # distconv's own setter, if it has replaced torch's: a plain tensor may be set to a distributed one.
    setter = vars(torch.Tensor).get("data", _DATA).__set__
    set_data = refusing("a tensor gets another memory (x.data = y)", setter)
    yield torch.Tensor, "data", property(_DATA.__get__, set_data)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            if here() and tensor.is_leaf:
                recorder.add_leaf(tensor)
            return function(tensor, *args)

        return call

    for owner in _schedulers():
        reason = "a scheduler takes its step: let it do so behind the captured step"
        yield owner, "step", refusing(reason, owner.step)
    yield torch.Tensor, "grad", property(noting(_GRAD.__get__), noting(_GRAD.__set__), noting(_GRAD.__delete__))
    reason = "a data loader gives its next batch: pass batches as arguments"
    for owner, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
        yield owner, name, refusing(reason, getattr(owner, name))
    yield from _generators(recorder, here)


def _generators(recorder: Recorder, here: Callable[[], bool]) -> Iterator[tuple[Any, str, Any]]:
    ask, put, seed = torch.random.get_rng_state, torch.random.set_rng_state, torch.random.manual_seed

    def state() -> torch.Tensor:
        value: torch.Tensor = recorder.call(ask, ()) if here() else ask()
        return value

    def set_state(new: torch.Tensor) -> None:
        if here():
            recorder.set_generator(new)
        put(new)

    def manual_seed(number: int) -> torch.Generator:
        if here():
            recorder.seeded(partial(_seed, seed, number))
        return seed(number)

    for owner in (torch, torch.random):
        yield owner, "get_rng_state", state
        yield owner, "set_rng_state", set_state
        yield owner, "manual_seed", manual_seed


def _schedulers() -> list[Any]:
    """Classes of torch's schedulers that have a step of their own."""
    classes = vars(torch.optim.lr_scheduler).values()
    return [
        each for each in classes if isinstance(each, type) and issubclass(each, LRScheduler) and "step" in vars(each)
    ]


def _seed(seed: Callable[[int], object], number: int) -> None:
    seed(number)


def _pythons_numbers() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest

"""Views share memory with their source, also where they had to be gathered: changes in place pass both ways.

A view that shares its block's memory with its source needs nothing. One that was moved is a copy: whoever changes a
tensor in place calls :func:`changed` afterwards, which writes a copy's values back to its source, and counts; a copy
whose source has been counted on is taken again the next time that anybody asks for its block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from distconv.errors import UnsupportedOperation
from distconv.tensor import DistTensor

Again = Callable[[], DistTensor]


class _SharedMemory:
    """What tensors that share a block's memory have in common: how often it has been changed in place."""

    changes = 0


def _memory(tensor: DistTensor) -> _SharedMemory:
    if tensor._memory is None:
        tensor._memory = _SharedMemory()
    memory: _SharedMemory = tensor._memory
    return memory


@dataclass(eq=False)
class _View:
    """Where a view comes from."""

    source: DistTensor
    again: Again
    """Takes the view once more, of what the source is then."""
    put_back: Callable[[DistTensor], object]
    recording: bool
    """True if autograd was, when the view was taken."""
    shape: torch.Size
    """The source's then."""
    seen: tuple[torch.Tensor, int] | None = None
    """The source's block and its changes that the view shows; of one that shares the block's memory, the block."""

    def shown(self, copied: bool) -> tuple[torch.Tensor, int]:
        return self.source.local, _memory(self.source).changes if copied else 0

    def refresh(self, view: DistTensor) -> None:
        """Take ``view`` again if its source is not what it was. Collective where it has to be moved."""
        shown = self.shown(view._memory is not self.source._memory)
        assert self.seen is not None
        if shown[0] is self.seen[0] and shown[1] == self.seen[1]:
            return
        if self.source.shape != self.shape:
            raise UnsupportedOperation(
                f"a view of shape {tuple(view.shape)} whose source has got another shape in place and was changed "
                f"since, from {tuple(self.shape)} to {tuple(self.source.shape)}: take the view after squeeze_ or "
                "unsqueeze_"
            )
        with torch.set_grad_enabled(self.recording):
            fresh = self.again()
        view.local, self.seen = fresh._local, shown


def _follow(view: DistTensor, source: DistTensor, again: Again, put_back: Callable[[DistTensor], object]) -> DistTensor:
    view._view = _View(source, again, put_back, torch.is_grad_enabled(), source.shape)
    view._view.seen = view._view.shown(view._memory is not source._memory)
    return view


def viewed(view: DistTensor, source: DistTensor, again: Again) -> DistTensor:
    """``view``, whose block shares the memory of the block of ``source``; ``again`` takes it once more."""
    view._memory = _memory(source)
    return view if source._view is None or view is source else _follow(view, source, again, lambda _: changed(source))


def moved(view: DistTensor, source: DistTensor, again: Again, put_back: Callable[[DistTensor], object]) -> DistTensor:
    """``view``, a copy; ``put_back`` writes its values to where torch would have written them."""
    _memory(view), _memory(source)
    return _follow(view, source, again, put_back)


Taken = tuple[DistTensor, DistTensor | None]


def takes_view(
    put_back: Callable[..., object] | None = None,
) -> Callable[[Callable[..., Taken]], Callable[..., DistTensor]]:
    """Decorates a function of a tensor (and options) that takes a view of it, and says of what it cut that.

    It returns the result, and the tensor whose block the result's is a view of: the argument itself, or what was moved
    for it; None for a copy, also in one process. ``put_back(result, *arguments)`` writes the values of a moved one to
    where torch would have written them; without it those may not be changed in place.
    """

    def decorate(take: Callable[..., Taken]) -> Callable[..., DistTensor]:
        @wraps(take)
        def call(input: DistTensor, *args: Any, **named: Any) -> DistTensor:
            result, of = take(input, *args, **named)
            if of is None:
                return result
            again = partial(call, input, *args, **named)
            if of is input:
                return viewed(result, input, again)
            if put_back is None:
                return moved(result, input, again, no_way_back(take.__name__))
            return moved(result, input, again, lambda changed: put_back(changed, input, *args, **named))

        return call

    return decorate


def no_way_back(name: str) -> Callable[[DistTensor], object]:
    """For a copy whose values cannot be put back."""

    def refuse(view: DistTensor) -> None:
        raise UnsupportedOperation(
            f"in-place change of a result of {name} that had to be gathered: it is a copy, while in torch it shares "
            "memory with its source; clone() it first, or assign to the source (x[...] = value)"
        )

    return refuse


def one_of_several(view: DistTensor, source: DistTensor, again: Again, name: str) -> DistTensor:
    """``view``, one of several that a function returns: while autograd records, nobody may change those in place."""

    def refuse(_: DistTensor) -> None:
        raise UnsupportedOperation(
            f"in-place change of one of the results of {name}: in torch they are several views of one tensor, which "
            "autograd does not let be changed in place; use the out-of-place operator"
        )

    return _follow(view, source, again, refuse) if view.requires_grad and torch.is_grad_enabled() else view


def changed(tensor: DistTensor) -> None:
    """To be called when ``tensor`` has been changed in place, on all ranks alike.

    Raises
    ------
    UnsupportedOperation
        If it is a copy that stands for a view, and its values cannot be put back.
    """
    _memory(tensor).changes += 1
    view = tensor._view
    if view is not None:
        view.put_back(tensor)
        view.seen = view.shown(tensor._memory is not view.source._memory)

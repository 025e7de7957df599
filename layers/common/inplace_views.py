"""Views that stay consistent with their source after in-place changes, also if they are copies.

In torch a view shares memory with its source. Here there are two cases:

- The block of the view shares memory with the block of the source (:func:`viewed`): an in-place change shows in both.
- The view was moved between ranks, so that it is a copy (:func:`moved`). After an in-place change of a view,
  :func:`changed` writes its values back to the source. After an in-place change of the source, the view is taken again
  when its block is used next.

In-place operators call :func:`changed`; operators that return views are decorated by :func:`takes_view`.
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
"""Takes a view again from the present values of its source."""


class _SharedMemory:
    """The state that tensors sharing a block's memory have in common: the number of in-place changes."""

    changes = 0


def _memory(tensor: DistTensor) -> _SharedMemory:
    if tensor._memory is None:
        tensor._memory = _SharedMemory()
    memory: _SharedMemory = tensor._memory
    return memory


@dataclass(eq=False)
class _View:
    """The source of a view, and how to keep both consistent."""

    source: DistTensor
    again: Again
    """Takes the view again from the present values of the source."""
    put_back: Callable[[DistTensor], object]
    """Writes the values of the changed view to the source."""
    recording: bool
    """True if autograd recorded when the view was taken. Otherwise the view is taken again without a graph."""
    shape: torch.Size
    """Shape of the source when the view was taken."""
    seen: tuple[torch.Tensor, int] | None = None
    """The source's block, and its number of changes, that the view shows. The number is 0 if the view shares memory."""

    def shown(self, copied: bool) -> tuple[torch.Tensor, int]:
        """Return the present value for ``seen``; ``copied`` is True if the view does not share the source's memory."""
        return self.source.local, _memory(self.source).changes if copied else 0

    def refresh(self, view: DistTensor) -> None:
        """Take ``view`` again if its source has changed. Collective if the view is moved between ranks."""
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
    """Record that ``view`` is a view of ``source``, and return it."""
    view._view = _View(source, again, put_back, torch.is_grad_enabled(), source.shape)
    view._view.seen = view._view.shown(view._memory is not source._memory)
    return view


def viewed(view: DistTensor, source: DistTensor, again: Again) -> DistTensor:
    """Record that a tensor's block shares memory with the block of its source.

    Parameters
    ----------
    view : DistTensor
    source : DistTensor
    again : callable
        Takes the view again from ``source``.

    Returns
    -------
    DistTensor
        ``view``.
    """
    view._memory = _memory(source)
    return view if source._view is None or view is source else _follow(view, source, again, lambda _: changed(source))


def moved(view: DistTensor, source: DistTensor, again: Again, put_back: Callable[[DistTensor], object]) -> DistTensor:
    """Record that a tensor is a view in torch but a copy here.

    Parameters
    ----------
    view : DistTensor
    source : DistTensor
    again : callable
        Takes the view again from ``source``.
    put_back : callable
        Takes the changed view, and writes its values to the positions of ``source`` that torch would have changed.

    Returns
    -------
    DistTensor
        ``view``.
    """
    _memory(view), _memory(source)
    return _follow(view, source, again, put_back)


Taken = tuple[DistTensor, DistTensor | None]
"""Result of a decorated function: the view, and the tensor whose block it views (None: a copy in torch, too)."""


def takes_view(
    put_back: Callable[..., object] | None = None,
) -> Callable[[Callable[..., Taken]], Callable[..., DistTensor]]:
    """Return a decorator for functions that take a view of their first argument.

    The decorated function returns a pair: the result, and the tensor of whose block the result's block is a view. This
    is the argument itself, or a tensor that was moved for it. It is None if the result is a copy in torch, too.

    Parameters
    ----------
    put_back : callable, optional
        Called as ``put_back(result, *arguments)`` after an in-place change of a moved result. Writes its values to the
        positions that torch would have changed. Without it such a change raises UnsupportedOperation.

    Returns
    -------
    callable
        The decorator. The function that it makes returns the result alone, recorded as a view.
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
    """Return a function that raises UnsupportedOperation, for copies whose values cannot be written back.

    Parameters
    ----------
    name : str
        The operator, for the message.

    Returns
    -------
    callable
        For the parameter ``put_back`` of :func:`moved`.
    """

    def refuse(view: DistTensor) -> None:
        raise UnsupportedOperation(
            f"in-place change of a result of {name} that had to be gathered: it is a copy, while in torch it shares "
            "memory with its source; clone() it first, or assign to the source (x[...] = value)"
        )

    return refuse


def one_of_several(view: DistTensor, source: DistTensor, again: Again, name: str) -> DistTensor:
    """Record that a tensor is one of several views that an operator returns.

    As in torch, changing such a view in place is an error while autograd records.

    Parameters
    ----------
    view : DistTensor
    source : DistTensor
    again : callable
        Takes the view again from ``source``.
    name : str
        The operator, for the message.

    Returns
    -------
    DistTensor
        ``view``.
    """

    def refuse(_: DistTensor) -> None:
        raise UnsupportedOperation(
            f"in-place change of one of the results of {name}: in torch they are several views of one tensor, which "
            "autograd does not let be changed in place; use the out-of-place operator"
        )

    return _follow(view, source, again, refuse) if view.requires_grad and torch.is_grad_enabled() else view


def changed(tensor: DistTensor) -> None:
    """Record that a tensor has been changed in place, and write the values of a copied view back to its source.

    Collective: call on every rank, after the change.

    Parameters
    ----------
    tensor : DistTensor
        The changed tensor.

    Raises
    ------
    UnsupportedOperation
        If ``tensor`` is a copy of a view, and its values cannot be written back.
    """
    _memory(tensor).changes += 1
    view = tensor._view
    if view is not None:
        view.put_back(tensor)
        view.seen = view.shown(tensor._memory is not view.source._memory)

"""Views that stay consistent with their source after in-place changes, also if they are copies.

In torch a view shares memory with its source. Here there are two cases:

- The block of the view shares memory with the block of the source (:func:`record_shared_view`). An in-place change is
  visible in both.
- The view was moved between ranks, so that it is a copy (:func:`record_copied_view`). After an in-place change of the
  view, :func:`record_inplace_change` writes its values back to the source. After an in-place change of the source, the
  view is taken again when its block is used next.

In-place operators call :func:`record_inplace_change`; operators that return views are decorated by :func:`takes_view`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from distconv.errors import UnsupportedOperation
from distconv.tensor import DistTensor

TakeView = Callable[[], DistTensor]
"""Takes a view again from the present values of its source."""


class _SharedMemory:
    """The state that tensors sharing a block's memory have in common: the number of in-place changes."""

    changes = 0


def _shared_memory(tensor: DistTensor) -> _SharedMemory:
    if tensor._memory is None:
        tensor._memory = _SharedMemory()
    memory: _SharedMemory = tensor._memory
    return memory


@dataclass(eq=False)
class _View:
    """The source of a view, and how to keep both consistent."""

    source: DistTensor
    retake: TakeView
    """Takes the view again from the present values of the source."""
    write_back: Callable[[DistTensor], object]
    """Writes the values of the changed view to the source."""
    grad_enabled: bool
    """True if autograd recorded when the view was taken. Otherwise the view is taken again without a graph."""
    shape: torch.Size
    """Shape of the source when the view was taken."""
    shown_state: tuple[torch.Tensor, int] | None = None
    """The source's block and number of changes when the view was last taken. The number is 0 if memory is shared."""

    def source_state(self, copied: bool) -> tuple[torch.Tensor, int]:
        """Return the present value for ``shown_state``; ``copied`` is True if the view has its own memory."""
        return self.source.local, _shared_memory(self.source).changes if copied else 0

    def refresh(self, view: DistTensor) -> None:
        """Take ``view`` again if its source has changed. Collective if the view is moved between ranks."""
        # Reading source.local refreshes the source first, if it is a view itself.
        shown = self.source_state(view._memory is not self.source._memory)
        assert self.shown_state is not None
        # Compare the object, too: `x.local = y` replaces a block without counting a change.
        if shown[0] is self.shown_state[0] and shown[1] == self.shown_state[1]:
            return
        if self.source.shape != self.shape:
            raise UnsupportedOperation(
                f"a view of shape {tuple(view.shape)} cannot be updated: the shape of its source was changed in place "
                f"from {tuple(self.shape)} to {tuple(self.source.shape)}, and then its values. Take the view after "
                "squeeze_ or unsqueeze_."
            )
        with torch.set_grad_enabled(self.grad_enabled):
            fresh = self.retake()
        # The object stays the same, since the caller holds it; its block becomes the one of the present values.
        view.local, self.shown_state = fresh._local, shown


def _record_view(
    view: DistTensor, source: DistTensor, retake: TakeView, write_back: Callable[[DistTensor], object]
) -> DistTensor:
    """Record that ``view`` is a view of ``source``, and return it."""
    # view._memory must be set before: the recorded state depends on whether memory is shared.
    view._view = _View(source, retake, write_back, torch.is_grad_enabled(), source.shape)
    view._view.shown_state = view._view.source_state(view._memory is not source._memory)
    return view


def record_shared_view(view: DistTensor, source: DistTensor, retake: TakeView) -> DistTensor:
    """Record that a tensor's block shares memory with the block of its source.

    Parameters
    ----------
    view : DistTensor
    source : DistTensor
    retake : callable
        Takes the view again from ``source``.

    Returns
    -------
    DistTensor
        ``view``.
    """
    view._memory = _shared_memory(source)
    # Shared memory alone keeps both consistent. Only a source that is a copied view itself must pass changes on.
    return (
        view
        if source._view is None or view is source
        else _record_view(view, source, retake, lambda _: record_inplace_change(source))
    )


def record_copied_view(
    view: DistTensor, source: DistTensor, retake: TakeView, write_back: Callable[[DistTensor], object]
) -> DistTensor:
    """Record that a tensor is a view in torch but a copy here.

    Parameters
    ----------
    view : DistTensor
    source : DistTensor
    retake : callable
        Takes the view again from ``source``.
    write_back : callable
        Takes the changed view, and writes its values to the positions of ``source`` that torch would have changed.

    Returns
    -------
    DistTensor
        ``view``.
    """
    # Each counts its changes from now on. They do not share memory, so a change must be carried over.
    _shared_memory(view), _shared_memory(source)
    return _record_view(view, source, retake, write_back)


ViewResult = tuple[DistTensor, DistTensor | None]
"""Result of a decorated function: the view, and the tensor whose block it views (None: a copy in torch, too)."""


def takes_view(
    write_back: Callable[..., object] | None = None,
) -> Callable[[Callable[..., ViewResult]], Callable[..., DistTensor]]:
    """Return a decorator for functions that take a view of their first argument.

    The decorated function returns a pair: the result, and the tensor of whose block the result's block is a view. This
    is the argument itself, or a tensor that was moved for it. It is None if the result is a copy in torch, too.

    Parameters
    ----------
    write_back : callable, optional
        Called as ``write_back(result, *arguments)`` after an in-place change of a moved result. Writes its values to
        the positions that torch would have changed. Without it such a change raises UnsupportedOperation.

    Returns
    -------
    callable
        The decorator. The function that it makes returns the result alone, recorded as a view.
    """

    def decorate(take: Callable[..., ViewResult]) -> Callable[..., DistTensor]:
        @wraps(take)
        def call(input: DistTensor, *args: Any, **named: Any) -> DistTensor:
            result, viewed = take(input, *args, **named)
            if viewed is None:
                return result
            # The decorated function: the tensor that it takes again replaces only the block of the result.
            retake = partial(call, input, *args, **named)
            if viewed is input:
                return record_shared_view(result, input, retake)
            if write_back is None:
                return record_copied_view(result, input, retake, raise_on_write_back(take.__name__))
            return record_copied_view(result, input, retake, lambda view: write_back(view, input, *args, **named))

        return call

    return decorate


def raise_on_write_back(name: str) -> Callable[[DistTensor], object]:
    """Return a function that raises UnsupportedOperation, for copies whose values cannot be written back.

    Parameters
    ----------
    name : str
        The operator, for the message.

    Returns
    -------
    callable
        For the parameter ``write_back`` of :func:`record_copied_view`.
    """

    def raise_unsupported(view: DistTensor) -> None:
        raise UnsupportedOperation(
            f"{name}: its result cannot be changed in place. In torch it shares memory with the argument, but this "
            "result was moved between ranks and is a copy. Clone it first, or assign to the argument: x[...] = value."
        )

    return raise_unsupported


def record_multi_view(view: DistTensor, source: DistTensor, retake: TakeView, name: str) -> DistTensor:
    """Record that a tensor is one of several views that an operator returns.

    As in torch, changing such a view in place is an error while autograd records.

    Parameters
    ----------
    view : DistTensor
    source : DistTensor
    retake : callable
        Takes the view again from ``source``.
    name : str
        The operator, for the message.

    Returns
    -------
    DistTensor
        ``view``.
    """

    def raise_unsupported(_: DistTensor) -> None:
        raise UnsupportedOperation(
            f"{name}: autograd does not allow in-place changes of its results, which are several views of one tensor. "
            "Use the out-of-place operator."
        )

    return (
        _record_view(view, source, retake, raise_unsupported)
        if view.requires_grad and torch.is_grad_enabled()
        else view
    )


def record_inplace_change(tensor: DistTensor) -> None:
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
    _shared_memory(tensor).changes += 1
    view = tensor._view
    if view is not None:
        # 1. Write back, which counts as a change of the source, and so on up to the first source. 2. Record the
        # source's new state. In the other order the view would be taken again from its own values.
        view.write_back(tensor)
        view.shown_state = view.source_state(tensor._memory is not view.source._memory)

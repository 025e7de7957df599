"""Results that are views in torch but had to be gathered here: changing them in place must reach their source.

A view that shares its block's memory with its source needs nothing. One that was moved carries a function that puts
its values back, and views of it carry on; whoever changes a tensor in place calls :func:`changed` afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from distconv.errors import UnsupportedOperation
from distconv.tensor import DistTensor

_PUT_BACK = "_distconv_put_back"


def viewed(view: DistTensor, source: DistTensor) -> DistTensor:
    """``view``, whose block shares the memory of the block of ``source``."""
    if hasattr(source, _PUT_BACK):
        setattr(view, _PUT_BACK, lambda _: changed(source))
    return view


def moved(view: DistTensor, put_back: Callable[[DistTensor], object]) -> DistTensor:
    """``view``, a copy; ``put_back`` writes its values to where torch would have written them."""
    setattr(view, _PUT_BACK, put_back)
    return view


def no_way_back(name: str) -> Callable[[DistTensor], object]:
    """For a copy whose values cannot be put back."""

    def refuse(view: DistTensor) -> None:
        raise UnsupportedOperation(
            f"in-place change of a result of {name} that had to be gathered: it is a copy, while in torch it may share "
            "memory with its source; clone() it first, or assign to the source (x[...] = value)"
        )

    return refuse


def one_of_several(name: str) -> Callable[[DistTensor], object]:
    """For one of several views that a function returns, which autograd cannot follow when it is changed in place."""

    def refuse(view: DistTensor) -> None:
        raise UnsupportedOperation(
            f"in-place change of one of the results of {name}: in torch they are several views of one tensor, which "
            "autograd does not let be changed in place; use the out-of-place operator"
        )

    return refuse


def changed(tensor: DistTensor) -> None:
    """To be called when ``tensor`` has been changed in place, on all ranks alike.

    Raises
    ------
    UnsupportedOperation
        If it is a copy that stands for a view, and its values cannot be put back.
    """
    put_back = getattr(tensor, _PUT_BACK, None)
    if put_back is not None:
        put_back(tensor)

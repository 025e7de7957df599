"""``torch.autograd.Function.apply``, which torch does not dispatch: with DistTensors it goes to the exact fallback.

The patches declared here are applied when distconv starts. Layers' full backward hooks, which torch makes of such a
function, work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import checkpoint

from distconv import dispatch
from distconv.autograd import recomputation
from distconv.errors import DistconvError, NoRule, UnsupportedOperation
from distconv.process import patches
from distconv.tensor import LAYOUTS, DistTensor

_KEEPS_INPUTS = getattr(checkpoint, "_NoopSaveInputs", None)
"""How torch before 2.13 keeps the arguments of a checkpoint; it computes nothing."""

_NODE: Any = BackwardHookFunction._backward_cls
"""The node that it makes."""

_Applied = torch.autograd.function._SingleLevelFunction
"""Where ``Function.apply`` ends. A script may hold a bound ``MyFunction.apply`` from before distconv has started."""


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return super(_Applied, cls).apply(*args, **kwargs)


def _checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``cls.apply`` of whole tensors; what comes out as a DistTensor, its gradient would be lost without a word."""
    if cls is BackwardHookFunction:
        return _hooked(args)
    if cls.__name__ == "RegisterPostBackwardFunction" and cls.__module__.startswith("torch.distributed.fsdp."):
        return _passed_through(cls, args)  # returns its inputs; its backward frees the weights of fully_shard
    if cls is _KEEPS_INPUTS:
        return _apply(cls, *args, **kwargs)
    if cls is checkpoint.CheckpointFunction and _distributed(args):
        return _recomputed(*args)
    name = f"{cls.__name__}.apply (a torch.autograd.Function)"
    way_out = "write it with torch's operators"
    if cls is checkpoint.CheckpointFunction:
        way_out = "pass use_reentrant=False to torch.utils.checkpoint, or the tensor as an argument of the function"
    try:
        if _distributed((args, kwargs)):
            return dispatch.call_fallback(NoRule(f"{name} has no distributed rule; {way_out}"), cls.apply, args, kwargs)
        result = _apply(cls, *args, **kwargs)
        if _distributed(result):
            raise UnsupportedOperation(
                f"{name} that returns a DistTensor, reached by closure or as an attribute: {way_out}"
            )
        return result
    except DistconvError as error:
        dispatch.add_layer_name(error)
        raise


def _recomputed(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """What a reentrant checkpoint of ``function`` returns, as the other kind computes it.

    As there nothing gets a gradient if no argument needs one, and all of it is computed again.

    Raises
    ------
    UnsupportedOperation
        Within one of the other kind, where it is computed another number of times, and running statistics move so.
    """
    if recomputation.is_in_early_stopping_block():
        raise UnsupportedOperation(
            "torch.utils.checkpoint with use_reentrant=True in a block of one without: pass use_reentrant=False to both"
        )
    checkpoint.check_backward_validity(args)
    if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        with torch.no_grad():
            return function(*args)
    with checkpoint.set_checkpoint_early_stop(False):
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _distributed(value: Any) -> bool:
    """Whether there is a DistTensor in ``value``."""
    if isinstance(value, (tuple, list)):
        return any(map(_distributed, value))
    if isinstance(value, dict):
        return any(map(_distributed, value.values()))
    return isinstance(value, DistTensor)


def _hooked(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """``tensors`` behind a node that takes a layer's full backward hooks."""
    hooked = _passed_through(BackwardHookFunction, tensors)
    layouts = [(t.dist, t.shape) if isinstance(t, DistTensor) else None for t in tensors]
    for node in [m.local.grad_fn if isinstance(m, DistTensor) else m.grad_fn for m in hooked]:
        if isinstance(node, _NODE):
            node.layouts = layouts
    return hooked


def _passed_through(cls: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what ``cls.apply`` returns, a Function whose results are its tensor arguments, applied to the blocks."""
    results = _apply(cls, *(arg.local if isinstance(arg, DistTensor) else arg for arg in args))
    given = args[len(args) - len(results) :]
    return tuple(
        DistTensor(result, arg.dist, arg.shape, arg._strides) if isinstance(arg, DistTensor) else result
        for result, arg in zip(results, given, strict=True)
    )


def _register_hook(node: Any, hook: Any) -> Any:
    """``node.register_hook``: gradients of the layer's tensors, in and out, are whole ones."""
    layouts = node.layouts

    def call(*blocks: Any) -> Any:
        return LAYOUTS.to_blocks(hook(*(LAYOUTS.to_global(b, layouts) for b in blocks)), layouts)

    return _register_on_node(node, call)


_register_on_node = _NODE.register_hook
patches.declare(_NODE, "register_hook", _register_hook, "full backward hooks get whole gradients")
patches.declare(_Applied, "apply", classmethod(_checked), "a Function of the user's own would get one rank's blocks")

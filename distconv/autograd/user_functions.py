"""``torch.autograd.Function.apply`` with DistTensors, which torch does not dispatch to tensor subclasses.

A user's Function is computed by the exact fallback, on full tensors. Functions of torch itself are passed through:
full backward hooks of modules, ``fully_shard``, and reentrant checkpoints. The patches declared here are applied when
distconv starts.
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
"""Function with which torch before 2.13 keeps the arguments of a checkpoint; it computes nothing."""

_NODE: Any = BackwardHookFunction._backward_cls
"""The class of its autograd nodes."""

_Applied = torch.autograd.function._SingleLevelFunction
"""The class to patch: a script may hold a bound ``MyFunction.apply`` from before distconv has started."""


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return super(_Applied, cls).apply(*args, **kwargs)


def _apply_checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``cls.apply``: compute with full tensors, and raise where a gradient would silently be lost."""
    # Functions of torch itself, which must see the blocks.
    if cls is BackwardHookFunction:
        return _attach_backward_hook_node(args)
    if cls.__name__ == "RegisterPostBackwardFunction" and cls.__module__.startswith("torch.distributed.fsdp."):
        return _apply_to_blocks(cls, args)  # returns its inputs; its backward frees the weights of fully_shard
    if cls is _KEEPS_INPUTS:
        return _apply(cls, *args, **kwargs)
    if cls is checkpoint.CheckpointFunction and _has_dist_tensor(args):
        return _checkpoint_reentrant(*args)
    name = f"{cls.__name__}.apply (a torch.autograd.Function)"
    fix = "write it with torch's operators"
    if cls is checkpoint.CheckpointFunction:
        fix = "pass use_reentrant=False to torch.utils.checkpoint, or the tensor as an argument of the function"
    try:
        if _has_dist_tensor((args, kwargs)):
            return dispatch.call_fallback(NoRule(f"{name} has no distributed rule; {fix}"), cls.apply, args, kwargs)
        result = _apply(cls, *args, **kwargs)
        if _has_dist_tensor(result):
            raise UnsupportedOperation(
                f"{name} that returns a DistTensor, reached by closure or as an attribute: {fix}"
            )
        return result
    except DistconvError as error:
        dispatch.add_layer_name(error)
        raise


def _checkpoint_reentrant(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Compute a reentrant checkpoint as a non-reentrant one.

    As in the reentrant kind, nothing gets a gradient if no argument requires one, and the block is recomputed fully.

    Raises
    ------
    UnsupportedOperation
        In a block of a non-reentrant checkpoint, where it would be recomputed a different number of times, and running
        statistics would be updated a different number of times.
    """
    if recomputation.is_in_early_stopping_block():
        raise UnsupportedOperation(
            "torch.utils.checkpoint with use_reentrant=True inside a block with use_reentrant=False. Pass "
            "use_reentrant=False to both"
        )
    # As torch's own reentrant checkpoint does: without a gradient to compute, nothing is stored.
    checkpoint.check_backward_validity(args)
    if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        with torch.no_grad():
            return function(*args)
    # A reentrant checkpoint runs the complete function again, with its side effects.
    with checkpoint.set_checkpoint_early_stop(False):
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _has_dist_tensor(value: Any) -> bool:
    """Return True if ``value`` is, or contains, a DistTensor."""
    if isinstance(value, (tuple, list)):
        return any(map(_has_dist_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_dist_tensor, value.values()))
    return isinstance(value, DistTensor)


def _attach_backward_hook_node(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return tensors with a new node, on which torch registers a module's full backward hooks."""
    hooked = _apply_to_blocks(BackwardHookFunction, tensors)
    layouts = [(t.dist, t.shape) if isinstance(t, DistTensor) else None for t in tensors]
    # torch registers hooks on the node. They find the layouts there.
    for node in [m.local.grad_fn if isinstance(m, DistTensor) else m.grad_fn for m in hooked]:
        if isinstance(node, _NODE):
            node.layouts = layouts
    return hooked


def _apply_to_blocks(cls: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a Function whose results are its last arguments to the blocks, and wrap the results."""
    results = _apply(cls, *(arg.local if isinstance(arg, DistTensor) else arg for arg in args))
    given = args[len(args) - len(results) :]
    return tuple(
        DistTensor(result, arg.dist, arg.shape, arg._strides) if isinstance(arg, DistTensor) else result
        for result, arg in zip(results, given, strict=True)
    )


def _register_hook(node: Any, hook: Any) -> Any:
    """Replace ``node.register_hook``: the hook gets full gradients of the module's inputs and outputs."""
    layouts = node.layouts

    def call(*blocks: Any) -> Any:
        return LAYOUTS.to_blocks(hook(*(LAYOUTS.to_global(b, layouts) for b in blocks)), layouts)

    return _register_on_node(node, call)


_register_on_node = _NODE.register_hook
patches.declare(_NODE, "register_hook", _register_hook, "full backward hooks get full gradients")
patches.declare(
    _Applied, "apply", classmethod(_apply_checked), "a Function of the user's own would get one rank's blocks"
)

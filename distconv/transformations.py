"""Program transformations of torch with DistTensors: ``torch.compile`` runs eagerly, the others raise.

TorchScript, tracing, exporting and ``torch.func`` work below torch's function interface, where a DistTensor has only
this rank's block. ``torch.compile`` compiles no call that has DistTensors among its arguments, and all other calls.

distconv applies the patches that are declared here when it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.export

from distconv.dispatch import OperatorKind, add_layer_name, implements
from distconv.errors import UnsupportedOperation
from distconv.process import patches
from distconv.tensor import DistTensor

_TRACE = "trace the model with a plain example before it is parallelized"
_SUGGESTED_FIXES = {
    "torch.jit.trace": _TRACE,
    "torch.jit.trace_module": _TRACE,
    "torch.export.export": "export the model with a plain example before it is parallelized",
    "TorchScript": "call the Python function or module that it was made from",
}


def contains_dist_tensor(value: Any) -> bool:
    """Return True if ``value`` is a DistTensor or contains one: in a list, tuple or dict, or as a module's state.

    Parameters
    ----------
    value : object
        Argument or result of a function.

    Returns
    -------
    bool
    """
    if isinstance(value, torch.nn.Module):
        return any(isinstance(t, DistTensor) for state in (value.parameters(), value.buffers()) for t in state)
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, DistTensor) or (isinstance(value, (list, tuple)) and any(map(contains_dist_tensor, value)))


def _reject_dist_tensors(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function`` with a check that raises UnsupportedOperation if an argument contains a DistTensor."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if contains_dist_tensor((args, kwargs)):
            error = UnsupportedOperation(
                f"{name} works below torch's function interface, where a DistTensor has only its block: "
                f"{_SUGGESTED_FIXES[name]}, or pass gathered tensors (dc.gather(x))"
            )
            add_layer_name(error)
            raise error
        return function(*args, **kwargs)

    return call


def _reject_forward_mode(*_: Any, **named: Any) -> None:
    raise UnsupportedOperation(
        "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp) of a DistTensor: use "
        "torch.autograd.functional.jvp, which takes two backward passes"
    )


implements(torch._make_dual, kind=OperatorKind.EFFECT, tensors=None)(_reject_forward_mode)
_RECORDS = "it would record one rank's blocks"
for _module, _name in ((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.export, "export")):
    _name_of_function = f"{_module.__name__}.{_name}"
    patches.declare(_module, _name, _reject_dist_tensors(getattr(_module, _name), _name_of_function), _RECORDS)
for _script in (torch._C.ScriptFunction, torch._C.ScriptMethod):
    patches.declare(
        _script, "__call__", _reject_dist_tensors(_script.__call__, "TorchScript"), "it runs below torch's functions"
    )


# -- compilation ------------------------------------------------------------------------------------------------------


def _skip_dist_tensor_frames(convert: Callable[..., Any], types: Any) -> Callable[..., Any]:
    """Wrap the compiler's ``convert``: a frame with DistTensors, and all frames that it calls, are not compiled."""

    @wraps(convert)
    def call(self: Any, frame: Any, *state: Any) -> Any:
        if not contains_dist_tensor(frame.f_locals):
            return convert(self, frame, *state)
        backend = getattr(self, "_torchdynamo_orig_backend", None) or self._torchdynamo_orig_callable  # torch 2.7
        if getattr(backend, "_one_graph", False):
            raise UnsupportedOperation(
                "torch.compile(fullgraph=True) of a function that is called with a DistTensor is unsupported. Without "
                "fullgraph=True such calls run eagerly. torch.cond and flex_attention set it, too: use Python's if and "
                "scaled_dot_product_attention instead"
            )
        # The frame and those that it calls. The code itself stays open: called with plain tensors it is compiled.
        skip = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
        return types.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)

    return call


_COMPILES = "compiled code would take a DistTensor for its block"


def _patch_compiler() -> None:
    from torch._dynamo import convert_frame, types

    wrapper = convert_frame.CatchErrorsWrapper
    # Once, since every call of torch.compile comes here.
    if not hasattr(wrapper.__call__, "__wrapped__"):
        patches.replace(wrapper, "__call__", _skip_dist_tensor_frames(wrapper.__call__, types), _COMPILES)


_compile = torch.compile


@wraps(_compile)
def _patched_compile(*args: Any, **kwargs: Any) -> Any:
    # Imported at the first use: importing the compiler takes seconds.
    _patch_compiler()
    return _compile(*args, **kwargs)


def _patch_loaded_compiler() -> None:
    if "torch._dynamo.convert_frame" in sys.modules:
        _patch_compiler()


patches.declare(torch, "compile", _patched_compile, _COMPILES)
patches.call_at_start(_patch_loaded_compiler)

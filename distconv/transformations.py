"""Programs that torch transforms, with distributed tensors in them: compiled ones run eagerly, others are refused.

Scripts, traces, exports and ``torch.func`` work on tensors below torch's function interface, where a DistTensor has
nothing but this rank's block. ``torch.compile`` leaves every call with distributed tensors alone, and compiles others.

The patches declared here are applied when distconv starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.export

from distconv.dispatch import Kind, implements, name_layer
from distconv.errors import UnsupportedOperation
from distconv.process import patches
from distconv.tensor import DistTensor

_TRACE = "trace the model with a plain example before it is parallelized"
_WAYS_OUT = {
    "torch.jit.trace": _TRACE,
    "torch.jit.trace_module": _TRACE,
    "torch.export.export": "export the model with a plain example before it is parallelized",
    "TorchScript": "call the Python function or module that it was made from",
}


def distributed(value: Any) -> bool:
    """Whether ``value`` is a DistTensor, or has one: in a list, tuple or dict, or as a module's parameter or buffer."""
    if isinstance(value, torch.nn.Module):
        return any(isinstance(t, DistTensor) for state in (value.parameters(), value.buffers()) for t in state)
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, DistTensor) or (isinstance(value, (list, tuple)) and any(map(distributed, value)))


def _refusing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function``, or a refusal of distributed tensors."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if distributed((args, kwargs)):
            error = UnsupportedOperation(
                f"{name} works below torch's function interface, where a DistTensor has only its block: "
                f"{_WAYS_OUT[name]}, or pass gathered tensors (dc.gather(x))"
            )
            name_layer(error)
            raise error
        return function(*args, **kwargs)

    return call


def _forward_mode(*_: Any, **named: Any) -> None:
    raise UnsupportedOperation(
        "forward-mode differentiation (torch.autograd.forward_ad, torch.func.jvp) of a DistTensor: use "
        "torch.autograd.functional.jvp, which takes two backward passes"
    )


implements(torch._make_dual, kind=Kind.EFFECT, tensors=None)(_forward_mode)
_RECORDS = "it would record one rank's blocks"
for _module, _name in ((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.export, "export")):
    _known = f"{_module.__name__}.{_name}"
    patches.declare(_module, _name, _refusing(getattr(_module, _name), _known), _RECORDS)
for _script in (torch._C.ScriptFunction, torch._C.ScriptMethod):
    patches.declare(_script, "__call__", _refusing(_script.__call__, "TorchScript"), "it runs below torch's functions")


# -- compilation ------------------------------------------------------------------------------------------------------


def _let_alone(convert: Callable[..., Any], types: Any) -> Callable[..., Any]:
    """The compiler's ``convert`` of a frame, which leaves alone one with distributed tensors and all that it calls."""

    @wraps(convert)
    def call(self: Any, frame: Any, *state: Any) -> Any:
        if not distributed(frame.f_locals):
            return convert(self, frame, *state)
        backend = getattr(self, "_torchdynamo_orig_backend", None) or self._torchdynamo_orig_callable  # torch 2.7
        if getattr(backend, "_one_graph", False):
            raise UnsupportedOperation(
                "torch.compile(fullgraph=True) of a function that is called with a DistTensor: without fullgraph=True "
                "it is not compiled for such calls, and runs; torch.cond and flex_attention compile so, too: use "
                "Python's if, and scaled_dot_product_attention"
            )
        skip = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
        return types.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)

    return call


_COMPILES = "compiled code would take a DistTensor for its block"


def _watch_compiler() -> None:
    from torch._dynamo import convert_frame, types

    wrapper = convert_frame.CatchErrorsWrapper
    if not hasattr(wrapper.__call__, "__wrapped__"):
        patches.replace(wrapper, "__call__", _let_alone(wrapper.__call__, types), _COMPILES)


_compile = torch.compile


@wraps(_compile)
def _watched_compile(*args: Any, **kwargs: Any) -> Any:
    # Not before it is needed: importing the compiler takes seconds.
    _watch_compiler()
    return _compile(*args, **kwargs)


def _watch_loaded_compiler() -> None:
    if "torch._dynamo.convert_frame" in sys.modules:
        _watch_compiler()


patches.declare(torch, "compile", _watched_compile, _COMPILES)
patches.call_at_start(_watch_loaded_compiler)

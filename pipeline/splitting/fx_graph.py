"""Steps of a model, traced by ``torch.fx``.

The tracer rejects models in which a trace would lose something, such as hooks or autograd Functions.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from distconv.layers.sparse import SparseConv
from distconv.plan import is_plannable_layer

from .graph_cuts import (
    EXAMPLE,
    Locate,
    ModelSteps,
    ModuleCall,
    SplitError,
    computing_positions,
    cut_graph,
    cut_test,
    is_tensor,
)

REPLACED = "it replaces a buffer; write into it, with copy_() or add_()"


class _OneInput(nn.Module):
    """Wrapper that calls a model with one argument.

    Other arguments keep their defaults. Attributes that tracing adds to the root do not reach the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


class _TensorProxy(fx.Proxy):
    """Proxy that raises if code tests for a tensor: the test would fail, and the trace would take the wrong branch."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if is_tensor(self.node) and _may_test_for_tensor(sys._getframe(1)):
            raise SplitError("it tests if a value is a tensor, which a traced proxy is not")
        return _TensorProxy


def _may_test_for_tensor(frame: FrameType | None) -> bool:
    """Return True if code outside torch that reads the class of a value may be testing for a tensor."""
    folder = str(Path(torch.__file__).parent)
    if frame is not None and frame.f_code.co_filename.startswith(str(Path(folder, "fx"))):
        return False
    while frame is not None and frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    names = () if frame is None else frame.f_code.co_names
    return "is_tensor" in names or ("isinstance" in names and "Tensor" in names)


class _Tracer(fx.Tracer):
    """Tracer that records where each module's call begins, and rejects what would be lost."""

    proxy_buffer_attributes = True  # buffers become steps; their values at the time of the trace would be constants

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ModuleCall] = []
        self.modes = autograd_modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_called_unchanged(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TensorProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        # type(): isinstance() would read __class__, which may raise.
        return a.node if type(a) is _TensorProxy else super().create_arg(a)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = self.path_of_module(m)
        if has_hooks(m) and not self.is_leaf_module(m, name):
            raise SplitError("it has hooks, which torch.fx would call once and then never again")
        name = name.removeprefix("model").removeprefix(".")
        self.calls.append(ModuleCall(name, is_layer(m), len(self.graph.nodes)))
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if autograd_modes() != self.modes:
            raise SplitError("it switches autograd or autocast on or off, which torch.fx does not record")
        return super().create_node(*args, **kwargs)


def is_layer(module: nn.Module) -> bool:
    """Return True if ``module`` is a convolution or linear layer, which the pipeline placement vector counts."""
    return is_plannable_layer(module) or isinstance(module, SparseConv)


def is_called_unchanged(module: nn.Module) -> bool:
    """Return True if a stage calls ``module`` unchanged: a layer, or a module of torch."""
    # Sites depend on values, which torch.fx does not have. Batch norms stay modules: RunningStatistics hooks them.
    return (
        is_layer(module)
        or isinstance(module, _BatchNorm)
        or module.__module__.startswith("distconv.layers.sparse.")
        or (module.__module__.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, nn.Sequential))
    )


def has_hooks(module: nn.Module) -> bool:
    """Return True if ``module`` has hooks, which a traced graph would lose."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(hooks)


def autograd_modes() -> tuple[bool | torch.dtype, ...]:
    """Return if autograd is enabled, and for the CPU and CUDA the autocast dtype, or False without autocast."""
    autocast = (torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), *autocast


def trace_steps(model: nn.Module) -> ModelSteps:
    """Return the steps of a model, traced by ``torch.fx``."""
    tracer, root, graph = _trace(model)
    computing = computing_positions(graph)

    def build(locate: Locate) -> list[nn.Module]:
        return [_module(model, root, piece) for piece in cut_graph(graph, locate(tracer.calls, computing))]

    return ModelSteps(tracer.calls, computing, build, cut_test(graph, root))


def _trace(model: nn.Module) -> tuple[_Tracer, nn.Module, fx.Graph]:
    """Return the trace of ``forward`` in training mode, checked to equal that in evaluation mode.

    A stage has one list of steps for both modes.
    """
    traces = []
    buffers = buffer_ids(model)
    for training in (False, True):
        with _restore_model(model):
            model.train(training)
            tracer, root = _Tracer(), _OneInput(model)
            try:
                with mock.patch.object(torch.autograd.Function, "apply", classmethod(_reject_function)):
                    traces.append((tracer, root, tracer.trace(root)))
                if buffer_ids(model) != buffers:
                    raise SplitError(REPLACED)
            except Exception as error:
                raise SplitError(describe_failure(model, error, "torch.fx", __file__, EXAMPLE)) from error
    (_, root, graph), (_, other_root, other) = traces
    for a, b in zip_longest(graph.nodes, other.nodes):
        if a is None or b is None or a.format_node() != b.format_node() or not _is_same_constant(a, root, other_root):
            raise SplitError(
                f"{type(model).__name__}: forward does not run the same operations each time, in train() and "
                f"eval(), from '{a or b}' on ({(a or b).format_node()}); {EXAMPLE}, or use modules (nn.Dropout, not "
                "F.dropout) that follow the mode"
            )
    return traces[-1]


def _reject_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    raise SplitError(f"{cls.__name__}.apply is an autograd Function, whose backward would be lost")


def _is_same_constant(node: fx.Node, root: nn.Module, other: nn.Module) -> bool:
    """Return True if a tensor that forward made without its input is equal in both traces, hence not random."""
    if node.op != "get_attr" or str(node.target).startswith("model."):
        return True
    one, two = _attribute(root, str(node.target)), _attribute(other, str(node.target))
    return not isinstance(one, torch.Tensor) or torch.equal(one, two)


def buffer_ids(model: nn.Module) -> dict[str, int]:
    """Return the identities of the buffers, by name."""
    return {name: id(buffer) for name, buffer in model.named_buffers()}


@contextmanager
def _restore_model(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers and attributes of ``model`` when the block ends, so that no proxies remain."""
    modules = (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def describe_failure(model: nn.Module, error: Exception, reader: str, file: str, *ways: str) -> str:
    """Return the message for a model that cannot be traced or recorded.

    It quotes the last line of the traceback outside torch and ``file``.

    Parameters
    ----------
    model : Module
    error : Exception
    reader : str
        Description of the tracer or recorder.
    file : str
        Its source file.
    *ways : str
        Suggested fixes.

    Returns
    -------
    str
    """
    others = (str(Path(torch.__file__).parent), file)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else "its forward"
    reason = (str(error) or type(error).__name__).split(". ")[0]
    advice = ", ".join([*ways, "make it an nn.Sequential, or write the list of stages by hand"])
    return f"{type(model).__name__}: {reader} cannot follow {line} ({reason}); {advice}"


def _module(model: nn.Module, root: nn.Module, graph: fx.Graph) -> nn.Module:
    attributes: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            name = str(node.target).removeprefix("model.")
            attributes[name] = _attribute(root, str(node.target))
            node.target = name
    stage = fx.GraphModule(attributes, graph, f"{type(model).__name__}Stage")
    stage.training = model.training
    saved = model.state_dict(keep_vars=True)
    for name, attribute in attributes.items():
        # Constants that forward made are no part of the model's saved state, and must not enter the stage's.
        if isinstance(attribute, torch.Tensor) and name not in saved:
            owner, _, last = name.rpartition(".")
            stage.get_submodule(owner).register_buffer(last, attribute, persistent=False)
    return stage


def _attribute(root: nn.Module, target: str) -> Any:
    return operator.attrgetter(target)(root)

"""Recording of a model's steps while its own forward runs with an example.

The forward of a copy runs on fake tensors, which have a shape, a dtype and a device, but no elements. Python control
flow that depends on these works, and so do modules that forward creates. Code that reads elements does not.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointFunction

from distconv.pipeline.stage.structures import Boundary, flatten

from .fx_graph import REPLACED, autograd_modes, buffer_ids, describe_failure, has_hooks, is_called_unchanged, is_layer
from .graph_cuts import ModuleCall, SplitError


class TensorExample(NamedTuple):
    """Shape, dtype and device type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorExample:
        """Return those of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)


class ModelInput(NamedTuple):
    """Arguments of a model, without the values of tensors.

    Attributes
    ----------
    tensors : tuple of TensorExample
    structure : object
        Structure of the pair of positional and keyword arguments, as of :func:`.flatten`.
    """

    tensors: tuple[TensorExample, ...]
    structure: Any

    @classmethod
    def from_arguments(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ModelInput, list[torch.Tensor]]:
        """Return the input, and its tensors.

        Parameters
        ----------
        args : tuple
        kwargs : dict

        Returns
        -------
        example : ModelInput
        tensors : list of Tensor
        """
        boundary = flatten((args, kwargs), "the input of the model")
        return cls(tuple(map(TensorExample.from_tensor, boundary.tensors)), boundary.structure), boundary.tensors

    @property
    def samples(self) -> int:
        """Number of samples."""
        return next(each.shape[0] for each in self.tensors if each.shape)

    def with_samples(self, count: int) -> ModelInput:
        """Return the input with another number of samples."""
        return self._replace(
            tensors=tuple(
                each._replace(shape=(count, *each.shape[1:])) if each.shape else each for each in self.tensors
            )
        )


class ForwardRecording(NamedTuple):
    """Steps of a forward pass, and the calls of modules in it."""

    graph: fx.Graph
    calls: list[ModuleCall]


class FakeModel:
    """Copy of a model with fake parameters and buffers, whose ``forward`` is recorded.

    Later changes of the model's own tensors (sharding, other values) do not reach it. ``names`` and ``modules`` have
    the names of tensors and of modules by their ids, for the model and for its copy.

    Raises
    ------
    SplitError
        If the model cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}
        self.modules: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        copies: dict[int, Any] = {}
        for name, tensor in _tensors(model):
            if id(tensor) not in copies:
                # deepcopy() below takes these for copies that it has made, so the copy has no elements.
                copies[id(tensor)] = self.fake.from_tensor(tensor if tensor.is_leaf else tensor.detach())
                # A function other than a method may still use the model's own tensors.
                self.names[id(tensor)] = self.names[id(copies[id(tensor)])] = name
        self._kept = [model, *copies.values()]  # so that no id is used twice
        try:
            self.model: nn.Module = copy.deepcopy(model, copies)
        except Exception as error:
            raise SplitError(f"{type(model).__name__} cannot be copied for a trial run: {error}") from error
        self.modules |= {id(module): name for name, module in self.model.named_modules()}
        self._buffers = buffer_ids(self.model)

    def __deepcopy__(self, memo: object) -> FakeModel:
        return self

    def record(self, example: ModelInput, training: Sequence[bool]) -> ForwardRecording:
        """Record ``forward`` with an input like ``example``.

        Parameters
        ----------
        example : ModelInput
        training : sequence of bool
            Mode of each of :func:`containers`.

        Returns
        -------
        ForwardRecording

        Raises
        ------
        SplitError
            If forward reads elements of tensors, or does something that a list of steps cannot repeat.
        """
        for module, mode in zip(containers(self.model), training, strict=True):
            module.training = mode
        try:
            # Hide saved tensors from the hooks of a pipeline, which would store notes of these weights.
            unpacked = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
            # A recording during training must not advance the random numbers of the run.
            with self.fake, torch.random.fork_rng(devices=[]), unpacked:
                tensors = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in example.tensors]
                recorder = _ForwardRecorder(self, tensors)
                recorder.run(*Boundary(tensors, example.structure).value())
            if buffer_ids(self.model) != self._buffers:
                raise SplitError(REPLACED)
        except Exception as error:
            raise SplitError(describe_failure(self.model, error, "its run with the example", __file__)) from error
        return ForwardRecording(recorder.graph, recorder.calls)


def containers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that stages do not call: their forward is recorded, in their present mode."""
    return [module for module in model.modules() if module is model or not is_called_unchanged(module)]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers, and tensors in plain attributes, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}".removeprefix("."), value


class _ForwardRecorder(TorchFunctionMode):
    """Records each call of a torch function, of a module that stages call, and of an autograd Function.

    ``_paused`` is True inside a recorded call, whose own calls are not recorded. Nodes of the graph have some of this
    ``meta``:

    - "like": the :class:`TensorExample` of the result, if it is a tensor.
    - "memory": number of the result's storage. Values with the same number share memory.
    - "written": such numbers of the arguments that the call changed in place.
    - "grad": True if autograd was enabled.
    - "inside": name of the innermost recorded module that made the call.
    - "form": on the output, the pytree structure of the model's result.
    """

    def __init__(self, blueprint: FakeModel, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.graph = fx.Graph()
        self.calls: list[ModuleCall] = []
        self._inside = [""]
        self._paused = False
        self._modes = autograd_modes()
        self._kept: list[Any] = [*inputs]  # so that no id is used twice
        self._nodes: dict[int, fx.Node] = {}
        for x in inputs:
            self._bind_result(self.graph.placeholder("x"), x)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the model's forward with these arguments."""
        call, apply = nn.Module.__call__, torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
        called = lambda module, *args, **kwargs: self._call(call, module, args, kwargs)  # noqa: E731
        applied = classmethod(lambda cls, *args, **kwargs: self._apply(apply, cls, args, kwargs))
        patched = mock.patch.object(nn.Module, "__call__", called)
        with patched, mock.patch.object(torch.autograd.Function, "apply", applied), self:
            result = self.blueprint.model(*args, **kwargs)
        leaves, form = tree_flatten(result)
        self.graph.output([self._argument(leaf) for leaf in leaves]).meta["form"] = form

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__iter__:  # a generator: its rows are made after this call
            with self:
                return iter(args[0].unbind(0))
        return self._record("call_function", func, func, args, kwargs or {})

    def _call(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self.blueprint.modules.get(id(module))
        if self._paused or name is None:
            return call(module, *args, **kwargs)
        self.calls.append(ModuleCall(name, is_layer(module), len(self.graph.nodes)))
        if name and is_called_unchanged(module):
            return self._record("call_module", name, lambda *a, **k: call(module, *a, **k), args, kwargs)
        if has_hooks(module):
            raise SplitError("it has hooks, which would be called once and then never again")
        self._inside.append(name)
        result = call(module, *args, **kwargs)
        self._inside.pop()
        return result

    def _apply(self, apply: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        # The function under the checkpoint is recorded. As one node it would hide the modules and weights that it uses.
        if cls is CheckpointFunction and not self._paused:
            function, _, *given = args
            return function(*given)
        return self._record("call_function", _application(cls), lambda *a, **k: apply(cls, *a, **k), args, kwargs)

    def _record(self, op: str, target: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._paused:
            return function(*args, **kwargs)
        self._paused = True
        try:
            given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
            versions = [tensor._version for tensor in given]
            result = function(*args, **kwargs)
            if _computes(target, result, given):
                written = {_memory(t) for t, version in zip(given, versions, strict=True) if t._version != version}
                self._bind_result(self._append_node(op, target, (tuple(args), dict(kwargs)), written), result)
            return result
        finally:
            self._paused = False

    def _append_node(self, op: str, target: Any, arguments: Any, written: set[int]) -> fx.Node:
        current = autograd_modes()
        if current[1:] != self._modes[1:]:
            raise SplitError("it switches autocast on or off, which the stages would not repeat")
        args, kwargs = fx.node.map_aggregate(arguments, self._argument)
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta |= {"grad": current[0], "inside": self._inside[-1], "written": written}
        return node

    def _bind_result(self, node: fx.Node, result: Any) -> None:
        """Store that ``node`` makes ``result``, or the tensors in it."""
        self._kept.append(result)
        if isinstance(result, torch.Tensor):
            self._nodes[id(result)] = node
            node.meta |= {"like": TensorExample.from_tensor(result), "memory": _memory(result)}
            return
        if not isinstance(result, (dict, list, tuple)):
            return
        for key, item in result.items() if isinstance(result, dict) else enumerate(result):
            if _has_tensors(item):
                part = self.graph.create_node("call_function", operator.getitem, (node, key))
                part.meta |= {"grad": True, "inside": self._inside[-1]}
                self._bind_result(part, item)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._nodes:
            if id(value) in self.blueprint.names:
                self._bind_result(self.graph.create_node("get_attr", self.blueprint.names[id(value)]), value)
            elif isinstance(value, FakeTensor):
                raise SplitError("it uses a tensor from an earlier call, or one whose origin torch does not report")
            else:
                return value
        return self._nodes[id(value)]


@cache
def _application(cls: Any) -> Callable[..., Any]:
    """Return a function that calls ``cls.apply`` as it is at the time of the call."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.__name__ = cls.__name__
    return apply


def _computes(function: Any, result: Any, given: list[torch.Tensor]) -> bool:
    """Return True if a stage has to repeat a call, because it makes or changes tensors."""
    if _has_tensors(result) or function is torch.Tensor.register_hook:
        return True
    # Reading an attribute, such as .grad, may return None, too, but changes nothing.
    return result is None and bool(given) and getattr(function, "__name__", "") != "__get__"


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(value)[0])


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

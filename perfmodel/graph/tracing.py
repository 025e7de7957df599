"""``trace``: the graph of a network from one run on meta tensors, which have shapes but no elements.

A recorder intercepts each torch function, so that Python control flow that depends on shapes works. The graph is
independent of distribution, machine and cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from distconv.dispatch import has_operator, python_body
from distconv.errors import DistconvError
from distconv.perfmodel.graph.graph import INPUT, GraphConstant, KernelWindow, LayerGraph, Operation, Value
from distconv.perfmodel.graph.recorder import FunctionRecorder
from distconv.plan import is_plannable_layer


class TraceError(DistconvError, ValueError):
    """A model does not run on meta tensors, or has no layer that decides a distribution."""


def trace(
    model: torch.nn.Module,
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> LayerGraph:
    """Record the graph of a model in training mode.

    The model runs once on meta tensors, without any computation. Its parameters, buffers and training modes are
    unchanged afterwards.

    Parameters
    ----------
    model : Module
        Model whose ``forward`` does not read elements of tensors.
    input_shape : sequence of int, or sequence of sequences of int
        Shape (N, C, ...) of the input with the mini-batch, or one shape for each input.
    loss : callable, optional
        ``loss(output)`` returns a tensor. Its operations become part of the graph.

    Returns
    -------
    LayerGraph
        Operations in the order of the forward pass.

    Raises
    ------
    TraceError
        If ``input_shape`` is invalid, the model does not run on such inputs or reads elements of tensors, or it has no
        convolution or linear layer.
    """
    shapes = _shapes(input_shape)
    # Meta tensors in place of parameters and buffers: an update of a running statistic must not reach the model's own.
    state = _parameters(model)
    state |= {name: _to_meta(b, False) for name, b in model.named_buffers()}
    floating = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
    inputs = [torch.empty(shape, dtype=floating, device="meta") for shape in shapes]
    recorder = _CallRecorder(state, inputs)
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        # New tensors of forward() are created on the device meta, too.
        with recorder.record_modules(model), torch.enable_grad(), torch.device("meta"):
            result = torch.func.functional_call(model, state, tuple(inputs))
            if loss is not None:
                loss(result)
    except Exception as error:
        where = f" (in {recorder.running_module})" if recorder.running_module else ""
        raise TraceError(
            f"{type(model).__name__} does not run on meta tensors of shape {', '.join(map(str, shapes))}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}. Give the shape with "
            "the batch, N first, and keep code that reads elements of tensors out of forward()"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    if not recorder.deciding:
        raise TraceError(f"{type(model).__name__} has no convolution or linear layer that could be distributed")
    return _graph(model, shapes, recorder)


def _shapes(given: Sequence[int] | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    # One shape, or a sequence of shapes; a mixture is an error.
    one = [extent for extent in given if isinstance(extent, int)]
    shapes = (tuple(one),) if one else tuple(tuple(shape) for shape in given if not isinstance(shape, int))
    if (
        len(one) not in (0, len(given))
        or not shapes
        or not all(shape and all(isinstance(e, int) and e > 0 for e in shape) for shape in shapes)
    ):
        raise TraceError(f"trace: input_shape={given!r} must be positive whole numbers (N, C, ...), the batch first")
    return shapes


def _to_meta(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=requires_grad)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a meta tensor for each parameter name; names of one shared parameter get the same tensor."""
    metas: dict[int, torch.Tensor] = {}
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameters[name] = metas.setdefault(id(parameter), _to_meta(parameter, parameter.requires_grad))
    return parameters


class _CallRecorder(FunctionRecorder):
    """Records each call of a torch function that computes a tensor from the network's inputs."""

    def __init__(self, state: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.constant_storages = {tensor.untyped_storage()._cdata for tensor in state.values()}
        # Reversed, so that a tensor with several names has the first one.
        self.constants = {id(tensor): name for name, tensor in reversed(list(state.items()))}
        self.kept += [state, inputs]
        self.values: dict[int, Value] = {}
        self.storages: dict[int, int] = {}
        for tensor in inputs:
            self.values[id(tensor)] = self._value(tensor, INPUT)
        self.operations: list[Operation] = []
        self.deciding: dict[str, None] = {}
        self.names: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        inputs = tuple(self.values[id(t)] for t in given if id(t) in self.values)
        # Without such an input the result is a constant, whose cost does not depend on the distribution.
        if not inputs:
            return func(*args, **kwargs)
        body = None if has_operator(func) else python_body(func)
        if body is not None:
            with self:  # records the functions that it calls instead
                return body(*args, **kwargs)
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        # Before the call, which may change an argument in place.
        described = tree_map_only(torch.Tensor, self._describe, (args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        name = getattr(func, "__name__", "")
        # It returns None, but changes its first argument.
        if name == "__setitem__":
            outputs = [args[0]]
        if outputs:  # the name of a property such as .data or .T is always __get__
            self._record(
                func,
                "view" if name == "__get__" else name,
                described,
                given=given,
                inputs=inputs,
                tensors=outputs,
                saved=saved,
            )
        return result

    def _describe(self, tensor: torch.Tensor) -> Value | GraphConstant:
        value = self.values.get(id(tensor))
        if value is not None:
            return value
        name = self.constants.get(id(tensor), "")
        self.kept.append(tensor)
        return GraphConstant(
            name, tuple(tensor.shape), tensor.itemsize, _dtype(tensor), bool(name) and tensor.requires_grad
        )

    def _value(self, tensor: torch.Tensor, producer: int) -> Value:
        storage = self.storages.setdefault(tensor.untyped_storage()._cdata, len(self.storages))
        return Value(
            shape=tuple(tensor.shape),
            itemsize=tensor.itemsize,
            dtype=_dtype(tensor),
            storage=storage,
            producer=producer,
            requires_grad=tensor.requires_grad,
        )

    def _record(
        self,
        function: Any,
        kind: str,
        described: tuple[Any, Any],
        *,
        given: list[torch.Tensor],
        inputs: tuple[Value, ...],
        tensors: list[torch.Tensor],
        saved: list[torch.Tensor],
    ) -> None:
        index = len(self.operations)
        # An id or a storage is a key as long as its tensor is alive: after that, a new tensor may have the same one.
        self.kept += [*tensors, *saved]
        before = {value.storage for value in inputs}
        objects = {id(t) for t in given}
        outputs = tuple(self._value(tensor, index) for tensor in tensors)
        # A tensor that is changed in place is from now on the result of this operation.
        for tensor, value in zip(tensors, outputs, strict=True):
            self.values[id(tensor)] = value
        in_place = any(id(t) in objects for t in tensors) and kind not in _SAME
        layer, window, groups = self._decision(kind, described)
        if layer:
            self.deciding.setdefault(layer)
        self.operations.append(
            Operation(
                index=index,
                name=self._name(kind, layer),
                kind=kind,
                layer=layer,
                decides=bool(layer),
                function=function,
                args=described[0],
                kwargs=described[1],
                inputs=inputs,
                constants=tuple(dict.fromkeys(c for c in tree_flatten(described)[0] if isinstance(c, GraphConstant))),
                outputs=outputs,
                saved=tuple(
                    self._value(t, index) for t in saved if t.untyped_storage()._cdata not in self.constant_storages
                ),
                in_place=in_place,
                view=not in_place and all(value.storage in before for value in outputs),
                window=window,
                groups=groups,
            )
        )

    def _decision(self, kind: str, described: tuple[Any, Any]) -> tuple[str, KernelWindow | None, int]:
        """Return the name of the deciding layer that this call is (or empty), its window and its groups."""
        window, groups = _window(kind, *described)
        # A plannable layer, such as nn.Conv2d, decides by its convolution, and not by a padding that it calls first.
        inner = self.running[-1] if self.running else ("", None)
        deciding = inner[1] is not None and is_plannable_layer(inner[1]) and kind in _DECIDING
        return (inner[0] if deciding else ""), window, groups

    def _name(self, kind: str, layer: str) -> str:
        # The name of a module without children says which function it calls; others call several.
        place, module = self.running[-1] if self.running else ("", None)
        leaf = module is not None and not any(True for _ in module.children())
        name = layer or (place if leaf and place else f"{place}.{kind}" if place else kind)
        used = self.names[name] = self.names.get(name, 0) + 1
        return name if used == 1 else f"{name}#{used}"


_CONVOLUTIONS = {f"conv{d}d": d for d in (1, 2, 3)} | {f"conv_transpose{d}d": d for d in (1, 2, 3)}
_POOLS = {f"{a}_pool{d}d": d for a in ("max", "avg", "lp") for d in (1, 2, 3)}
_DECIDING = {*_CONVOLUTIONS, "linear"}
_SAME = {"contiguous", "to", "float", "detach", "requires_grad_"}
"""Functions that may return their argument itself without writing into it, so that they are not in-place operations."""

_ORDER = {
    "convolution": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "transposed": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    "max": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg": ("input", "kernel_size", "stride", "padding"),
    "lp": ("input", "norm_type", "kernel_size", "stride"),
}
"""Names of torch's positional arguments, by kind of convolution and of pooling."""


def _window(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[KernelWindow | None, int]:
    if kind in _CONVOLUTIONS:
        dims, transposed = _CONVOLUTIONS[kind], "transpose" in kind
        given = _name_arguments(_ORDER["transposed" if transposed else "convolution"], args, kwargs)
        kernel = tuple(given["weight"].shape[2:])
        dilation = _per_dimension(given.get("dilation"), dims, (1,) * dims)
        padding = given.get("padding")
        if isinstance(padding, str):
            same = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
            padding = same if padding == "same" else (0,) * dims
        return KernelWindow(
            kernel,
            _per_dimension(given.get("stride"), dims, (1,) * dims),
            _per_dimension(padding, dims, (0,) * dims),
            dilation,
            transposed,
        ), int(given.get("groups") or 1)
    if kind in _POOLS:
        dims = _POOLS[kind]
        given = _name_arguments(_ORDER[kind.split("_")[0]], args, kwargs)
        kernel = _per_dimension(given["kernel_size"], dims, (1,) * dims)
        return KernelWindow(
            kernel,
            _per_dimension(given.get("stride"), dims, kernel),
            _per_dimension(given.get("padding"), dims, (0,) * dims),
            _per_dimension(given.get("dilation"), dims, (1,) * dims),
        ), 1
    return None, 1


def _name_arguments(order: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(order, args, strict=False)), **kwargs}


def _per_dimension(value: Any, dims: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if value is None or value == [] or value == ():
        return default
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) if len(value) == dims else tuple(value) * dims


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _graph(model: torch.nn.Module, shapes: tuple[tuple[int, ...], ...], recorder: _CallRecorder) -> LayerGraph:
    """Return the recorded operations, each with the deciding layer whose distribution it has."""
    # The recording is in the order of the calls, so the layer of a producer is known before its readers.
    ran = set(recorder.deciding)
    first = next(name for name, _ in model.named_modules() if name in ran)
    operations: list[Operation] = []
    for op in recorder.operations:
        producer = op.inputs[0].producer
        inherited = first if producer == INPUT else operations[producer].layer
        operations.append(op if op.decides else replace(op, layer=inherited))
    return LayerGraph(type(model).__name__, shapes, first, tuple(operations), tuple(recorder.deciding))

"""Measurement of layer profiles while the full network trains.

A layer begins where a module without children, or with parameters of its own, is called. It ends where the next one
begins, so an addition after a batch norm belongs to the batch norm. Splitting before a layer is splitting before its
module::

    hooks:    conv1 |   | relu |   | conv2 |   | backward: nodes of conv2 | of relu | of conv1 |
    the clock is stopped ......^...........^ while a hook searches for new autograd nodes, which belong to the layer

Layers are thus timed in place, with the state of the caches that their neighbours leave. Each measured step also runs
without hooks, and :attr:`Timing.ratio` compares the two times.

An input may be a sparse tensor, a tree of coordinates and features. Each step gets a new one with the same values, so
that the first layer that needs a kernel map builds it, as in training. After a split, the next layer would build it. A
message between layers contains the features and their coordinates, but no kernel maps.

Source: Zhai et al. 2020 (SparsePipe), III-C, SmartProfile: 50 iterations of warm-up, then 100 that count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from distconv.errors import DistconvError
from distconv.perfmodel.graph.recorder import FunctionRecorder, module_calls
from distconv.perfmodel.profiles.layer_profile import Layer, Profile

WARM_UP = 50
ITERATIONS = 100

Node = Any
"""Autograd node. Its C++ classes have no common type in Python."""


class TimingError(DistconvError, ValueError):
    """Layers cannot be timed: the network does not run, trains nothing, or calls different layers in each step."""


@dataclass(frozen=True)
class Timing:
    """Measured layer profile and the time of a full step.

    Attributes
    ----------
    profile : Profile
        Median seconds of each layer.
    step_s : float
        Median seconds of forward and backward without hooks.
    """

    profile: Profile
    step_s: float

    @property
    def ratio(self) -> float:
        """Sum of the layers' times divided by the time of the full step; 1 if the hooks neither miss nor add time."""
        return sum(layer.time_s for layer in self.profile.layers) / self.step_s


def time_layers(
    model: torch.nn.Module, inputs: Sequence[Any], warm_up: int = WARM_UP, iterations: int = ITERATIONS
) -> Timing:
    """Measure each layer of a model in training, on one process and the device of the inputs.

    The backward pass starts from random gradients of the output. Gradients are None at the start of each step, and
    there is no optimizer. Running statistics of the model change, as in any training step.

    Source: Zhai et al. 2020 (SparsePipe), III-C.

    Parameters
    ----------
    model : Module
        Model on the same device as ``inputs``.
    inputs : sequence
        Tensors (N, C, ...) or sparse tensors, the arguments of ``model``.
    warm_up : int
        Steps that are not measured.
    iterations : int
        Measured steps.

    Returns
    -------
    Timing
        Median times.

    Raises
    ------
    TimingError
        If the model does not run on the inputs, has no output that requires a gradient, or does not call the same
        layers in each step; if ``warm_up`` is negative or ``iterations`` not positive.
    """
    if warm_up < 0 or iterations < 1:
        raise TimingError(f"warm_up={warm_up}, iterations={iterations}: expected at least 0 and at least 1")
    training = {module: module.training for module in model.modules()}
    model.train()
    try:
        return _time_steps(model, inputs, warm_up, iterations)
    except TimingError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(given.shape)) for given in inputs)
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise TimingError(f"{type(model).__name__} does not train on input of shape {shapes}: {text}") from error
    finally:
        model.zero_grad(set_to_none=True)
        for module, mode in training.items():
            module.training = mode


def _time_steps(model: torch.nn.Module, inputs: Sequence[Any], warm_up: int, iterations: int) -> Timing:
    graph = _ProfileRecorder({id(parameter) for parameter in model.parameters()}, sparse=any(map(_is_sparse, inputs)))
    with graph, module_calls(model, graph.begin, lambda result: None, _is_layer):
        outputs = model(*_fresh_inputs(inputs))
    graph.mark_returned(outputs)
    errors = [torch.rand_like(tensor) for tensor in _trainable_outputs(model, outputs)]
    # Otherwise the first graph would occupy memory during all measured steps.
    del outputs
    clock = _DeviceClock(inputs[0].device)
    for _ in range(warm_up):
        _step(model, _fresh_inputs(inputs), errors)
    plain, layered = [], []
    for _ in range(iterations):
        # Without and with hooks in turn, so that a change of the machine's speed affects both. Copies are not timed.
        given = _fresh_inputs(inputs)
        start = clock.now()
        _step(model, given, errors)
        plain.append(clock.seconds([(0, start, clock.now())], 1)[0])
        layered.append(_time_layers_of_step(model, _fresh_inputs(inputs), errors, clock, len(graph.names)))
    columns = list(zip(*layered, strict=True))
    seconds = [statistics.median(column) for column in columns]
    return Timing(graph.profile(type(model).__name__, seconds), statistics.median(plain))


def _fresh_inputs(inputs: Sequence[Any]) -> Any:
    """Return the inputs, with sparse tensors cloned so that they lack the kernel maps of an earlier step."""
    return [tree_map(torch.clone, given) if _is_sparse(given) else given for given in inputs]


def _is_sparse(value: object) -> bool:
    """Return True if it is a sparse tensor, recognized by its ``coords``: this module must not import sparse layers."""
    return not isinstance(value, torch.Tensor) and hasattr(value, "coords")


def _step(model: torch.nn.Module, inputs: Sequence[Any], errors: Sequence[torch.Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    torch.autograd.backward(_trainable_outputs(model, model(*inputs)), errors)


def _trainable_outputs(model: torch.nn.Module, outputs: object) -> list[torch.Tensor]:
    tensors = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
    if not tensors:
        raise TimingError(f"{type(model).__name__} has no output that requires a gradient, so it has no backward pass")
    return tensors


def _tensors(values: object) -> list[torch.Tensor]:
    """Return all tensors of a tree; for sparse tensors the features."""
    # A sparse tensor is a leaf here, since its coordinates are not results of layers.
    leaves = (value.features if _is_sparse(value) else value for value in _values(values))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _values(tree: object) -> list[Any]:
    return tree_leaves(tree, is_leaf=_is_sparse)


def _is_layer(name: str, module: torch.nn.Module) -> bool:
    """Return True if a module has no children, or parameters of its own."""
    childless = not any(True for _ in module.children())
    return childless or (bool(name) and any(True for _ in module.parameters(recurse=False)))


# -- layers of a network ----------------------------------------------------------------------------------------------


class _ProfileRecorder(FunctionRecorder):
    """Records in one forward pass which layer made and read each tensor, and which used each parameter first.

    In a ``sparse`` network, integer tensors are coordinates and kernel maps, not results of layers.
    """

    def __init__(self, parameters: set[int], *, sparse: bool) -> None:
        super().__init__()
        self.parameters, self.sparse = parameters, sparse
        self.coordinates: dict[int, int] = {}
        """Bytes of the coordinates that are sent with features, by the id of the features."""
        self.names: list[str] = []
        """Modules of the layers, in the order of their calls; a layer is an index into this list."""
        self.made: dict[int, int] = {}
        """Layer that made each tensor, by the id of the tensor."""
        self.edges: dict[tuple[int, int], None] = {}
        """Pairs of a producing and a reading layer, in the order of their discovery."""
        self.passed_on: dict[int, dict[int, int]] = {}
        """Bytes that later layers read, by the layer that made them and by storage, so that views count once."""
        self.held: dict[int, dict[int, int]] = {}
        """Bytes of the parameters that each layer is the first to use, by the id of the parameter."""

    @property
    def current(self) -> int:
        """Index of the running layer. Operations before the first layer belong to it."""
        return max(0, len(self.names) - 1)

    def begin(self, name: str, module: torch.nn.Module, args: object) -> None:
        self.names.append(name)
        self._record_tensors(args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._record_tensors((args, kwargs or {}))
        self._read(given)
        result = func(*args, **(kwargs or {}))
        ids = {id(tensor) for tensor in given}
        for tensor in self._record_tensors(result):
            # A call that returns its argument, such as a property, does not make the tensor.
            if id(tensor) not in self.parameters and (id(tensor) not in ids or id(tensor) in self.made):
                self.made[id(tensor)] = self.current
                self.kept.append(tensor)
        return result

    def _record_tensors(self, values: object) -> list[torch.Tensor]:
        for value in filter(_is_sparse, _values(values)):
            self.coordinates[id(value.features)] = value.coords.nbytes
        return [tensor for tensor in _tensors(values) if tensor.is_floating_point() or not self.sparse]

    def _read(self, given: Sequence[torch.Tensor]) -> None:
        # A shared parameter counts at the first layer that uses it.
        used = {parameter for parameters in self.held.values() for parameter in parameters}
        for tensor in given:
            if id(tensor) in self.parameters and id(tensor) not in used:
                self.held.setdefault(self.current, {})[id(tensor)] = tensor.nbytes
            producer = self.made.get(id(tensor), self.current)
            if producer != self.current:
                self.edges.setdefault((producer, self.current))
                self._mark_used(producer, tensor)

    def _mark_used(self, producer: int, tensor: torch.Tensor) -> None:
        size = tensor.nbytes + self.coordinates.get(id(tensor), 0)
        self.passed_on.setdefault(producer, {})[tensor.untyped_storage()._cdata] = size

    def mark_returned(self, outputs: object) -> None:
        """Record that the network's outputs are passed on as well."""
        for tensor in _tensors(outputs):
            if id(tensor) in self.made:
                self._mark_used(self.made[id(tensor)], tensor)
        # No id is looked up after this, so the activations may be freed.
        self.kept.clear()

    def profile(self, model: str, seconds: Sequence[float]) -> Profile:
        """Return the profile with ``seconds``: forward of each layer, then backward of each."""
        names = _number_names([name or model for name in self.names] or [model])
        layers = [
            Layer(
                name,
                seconds[index],
                seconds[len(names) + index],
                sum(self.passed_on.get(index, {}).values()),
                sum(self.held.get(index, {}).values()),
            )
            for index, name in enumerate(names)
        ]
        return Profile(layers, [(names[producer], names[consumer]) for producer, consumer in self.edges])


def _number_names(names: Sequence[str]) -> list[str]:
    """Return unique names: ``name``, and ``name#2`` for the second call."""
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        numbered.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return numbered


# -- the clock --------------------------------------------------------------------------------------------------------


class _DeviceClock:
    """Clock of a device. On a GPU it records events, so that the host does not wait between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """Return a mark for :meth:`seconds`."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, intervals: Sequence[tuple[int, Any, Any]], size: int) -> list[float]:
        """Return the sum of the intervals of each index."""
        totals = [0.0] * size
        # Once for all intervals: elapsed_time requires that both events have occurred.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for index, start, stop in intervals:
            totals[index] += stop - start if self.device.type != "cuda" else start.elapsed_time(stop) / 1e3
        return totals


@dataclass
class _Intervals:
    """Measured intervals; indices count the forward passes of the layers, then the backward passes."""

    clock: _DeviceClock
    found: list[tuple[int, Any, Any]] = field(default_factory=list)
    index: int = 0
    start: Any = None

    def start_interval(self, index: int) -> None:
        self.index, self.start = index, self.clock.now()

    def stop_interval(self) -> None:
        self.found.append((self.index, self.start, self.clock.now()))

    def switch(self, index: int) -> None:
        if index != self.index:
            self.stop_interval()
            self.start_interval(index)


def _time_layers_of_step(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    errors: Sequence[torch.Tensor],
    clock: _DeviceClock,
    layers: int,
) -> list[float]:
    """Return the forward seconds of each layer, then the backward seconds of each, in one step."""
    model.zero_grad(set_to_none=True)
    intervals, owned, names = _Intervals(clock), set[Node](), list[str]()

    # The autograd nodes that are new since the last call belong to the running layer. In backward, the first of them
    # that runs stops the clock of the layer after and starts that of its own layer.
    def own(values: object) -> None:
        layer = max(0, len(names) - 1)
        for node in _new_nodes(values, owned):
            node.register_prehook(lambda gradients: intervals.switch(layers + layer))

    def before(name: str, module: torch.nn.Module, args: object) -> None:
        intervals.stop_interval()
        own(args)
        names.append(name)
        intervals.start_interval(len(names) - 1)

    def after(result: object) -> None:
        intervals.stop_interval()
        own(result)
        intervals.start_interval(len(names) - 1)

    intervals.start_interval(0)
    with module_calls(model, before, after, _is_layer):
        outputs = model(*inputs)
    intervals.stop_interval()
    if max(1, len(names)) != layers:
        raise TimingError(
            f"{type(model).__name__} called {layers} layers in an earlier step and {len(names)} in this one"
        )
    own(outputs)
    # Backward begins with the last layer. Hooks of nodes switch to the layers before it.
    intervals.start_interval(2 * layers - 1)
    torch.autograd.backward(_trainable_outputs(model, outputs), errors)
    intervals.stop_interval()
    return clock.seconds(intervals.found, 2 * layers)


def _new_nodes(values: object, owned: set[Node]) -> Iterator[Node]:
    """Yield the autograd nodes of ``values`` that are not in ``owned``, without accumulation nodes of parameters.

    Those run directly after the node that computes the gradient, so they count as part of it.
    """
    waiting = [tensor.grad_fn for tensor in _tensors(values)]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in owned and not hasattr(node, "variable"):
            owned.add(node)
            waiting += [following for following, _ in node.next_functions]
            yield node

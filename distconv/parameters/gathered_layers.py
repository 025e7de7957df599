"""Layers with sharded weights: hooks by which a layer sees gathered weights during its forward pass.

Autograd saves references in place of gathered weights, and gathers them again when backward needs them. The groups in
which weights are gathered are in :mod:`.weight_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from distconv.errors import UnsupportedOperation
from distconv.parameters.weight_groups import GatheredGroups, ShardedWeight, WeightGroup
from distconv.tensor import DistTensor

GROUP_BYTES = 1 << 20
"""Least size of the full weights of a group, unless a single layer is larger or the model ends."""


def gather_for_layers(model: torch.nn.Module, weights: Sequence[tuple[torch.nn.Module, str, ShardedWeight]]) -> None:
    """Form groups of sharded weights, and register the hooks that gather them for their layers.

    Parameters
    ----------
    model : Module
        The model.
    weights : sequence of (Module, str, ShardedWeight)
        Owner and attribute of each weight, in the order of the layers.
    """
    gathered = GatheredGroups()
    places: dict[ShardedWeight, tuple[WeightGroup, int]] = {}
    for group in _form_groups(weights, gathered):
        places |= {weight: (group, index) for index, weight in enumerate(group.weights)}
    of_layers: dict[torch.nn.Module, list[tuple[torch.nn.Module, str, WeightGroup, int]]] = {}
    for owner, name, weight in weights:
        of_layers.setdefault(owner, []).append((owner, name, *places[weight]))
    for layer in model.modules():
        # Attention reads the weights of its last layer, which it does not call.
        if isinstance(layer, torch.nn.MultiheadAttention) and layer.out_proj in of_layers:
            of_layers.setdefault(layer, []).extend(of_layers[layer.out_proj])
    for layer, entries in of_layers.items():
        hook = _LayerHooks(entries)
        # First of all: other hooks may compute a weight from the parameters, such as that of weight norm.
        layer.register_forward_pre_hook(hook.before, prepend=True)
        layer.register_forward_hook(hook.prepare_backward)
        layer.register_forward_hook(hook.restore, always_call=True)
    hooks = _ModelHooks(gathered)
    model.register_forward_pre_hook(hooks.begin, prepend=True)
    # After an error, too: the weights may change from then on.
    model.register_forward_hook(hooks.end, always_call=True)


class _ModelHooks:
    """Hooks of a model, where a forward pass begins and ends; not where backward recomputes a checkpointed one."""

    def __init__(self, gathered: GatheredGroups) -> None:
        self._gathered = gathered

    def begin(self, model: torch.nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._gathered.begin_forward()

    def end(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._gathered.end_forward()


def _form_groups(
    weights: Sequence[tuple[torch.nn.Module, str, ShardedWeight]], gathered: GatheredGroups
) -> list[WeightGroup]:
    """Return the groups: the weights of a layer are in one group, unless their kinds differ."""
    groups: list[list[ShardedWeight]] = []
    grouped: set[ShardedWeight] = set()
    last_kind: object = None
    last_size, last_owner = 0, None
    for owner, _, weight in weights:
        if weight in grouped:  # several layers use it: it is in the group of the first one
            continue
        local = weight.local
        kind = (weight.parameter.grid, weight.grid, weight.axes, local.dtype, local.device)
        if kind != last_kind or (owner is not last_owner and last_size >= GROUP_BYTES):
            groups.append([])
            last_size = 0
        groups[-1].append(weight)
        grouped.add(weight)
        last_kind, last_owner = kind, owner
        last_size += math.prod(weight.full_shape) * local.element_size()
    return [WeightGroup(group, gathered) for group in groups]


@dataclass(frozen=True)
class _SavedWeight:
    """A view of a gathered weight that autograd has saved: gathered again when it is needed."""

    group: WeightGroup
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int
    """Count of the in-place changes of this rank's block."""


@dataclass(frozen=True)
class _SavedTensor:
    """Another tensor that autograd has saved."""

    value: Any
    version: int
    unpack: Callable[[Any], torch.Tensor] | None
    """The caller's unpack hook, or None."""


class _Replaced(NamedTuple):
    """A parameter for which a gathered weight is in place."""

    owner: torch.nn.Module
    name: str
    weight: ShardedWeight
    gathered: torch.Tensor
    version: int
    """Count of the in-place changes of ``gathered`` before the layer used it."""


@dataclass
class _RunningForward:
    """A running forward pass of a layer."""

    replaced: list[_Replaced] = field(default_factory=list)
    context: saved_tensors_hooks | None = None
    """The context in which tensors are saved; None under ``no_grad``."""


class _LayerHooks:
    """Hooks of a layer, which sees gathered weights during its forward pass.

    ``weights``: owner, attribute, group, and number in the group of each weight that the layer uses.
    """

    def __init__(self, weights: Sequence[tuple[torch.nn.Module, str, WeightGroup, int]]) -> None:
        self.weights = list(weights)
        self._calls: list[_RunningForward] = []
        """The running calls, of which a layer that calls itself has several."""

    def before(self, module: torch.nn.Module, args: Any) -> None:
        """Replace the sharded weights by gathered ones: pre-hook of ``forward``. Collective: call on every rank."""
        call = _RunningForward()
        self._calls.append(call)
        for owner, name, group, index in self.weights:
            parameter = group.weights[index].parameter
            # Other tensors may be in place of the parameters, as in torch.func.functional_call.
            if id(owner._parameters.get(name)) == id(parameter):
                group.gathered.acquire(group)
                tensor = group.tensor(index)
                gathered = tensor.local if isinstance(tensor, DistTensor) else tensor
                _set(owner, name, tensor)
                call.replaced.append(_Replaced(owner, name, group.weights[index], gathered, gathered._version))
        if torch.is_grad_enabled():
            # The hooks of this layer are in place of those of the caller, to which they pass the other tensors.
            outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
            call.context = saved_tensors_hooks(partial(_pack, self.weights[0][2].gathered, outer), _unpack)
            call.context.__enter__()

    def prepare_backward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Check the weights, and register hooks that gather them in backward: hook of ``forward``."""
        for each in self._calls[-1].replaced:
            if each.gathered._version != each.version:
                raise UnsupportedOperation(
                    f"weight {each.weight.name!r} is sharded, and its layer changed it in place during forward: the "
                    "change would be lost. Change the parameter before the forward pass, or parallelize without "
                    "shard_weights"
                )
        # Ranks that have an empty block may compute without the weight. All of them have a gradient of the output.
        for leaf in tree_leaves(output):
            local = leaf.local if isinstance(leaf, DistTensor) else leaf
            if isinstance(local, torch.Tensor) and local.requires_grad:
                local.register_hook(self._before_backward)

    def restore(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Restore the parameters: hook of ``forward``, which torch calls after an error, too."""
        call = self._calls.pop()
        if call.context is not None:
            call.context.__exit__(None, None, None)
        for each in call.replaced:
            _set(each.owner, each.name, each.weight.parameter)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        for group in dict.fromkeys(group for _, _, group, _ in self.weights):
            group.gathered.acquire(group)


SavingHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def _pack(gathered: GatheredGroups, outer: SavingHooks | None, tensor: torch.Tensor) -> _SavedWeight | _SavedTensor:
    """Return what autograd saves for a tensor; ``outer``: the hooks of the caller."""
    address = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    if address in gathered.memory:
        group, index = gathered.memory[address]
        version = group.weights[index].local._version
        return _SavedWeight(group, index, tensor.size(), tensor.stride(), int(tensor.storage_offset()), version)
    if outer is not None:
        return _SavedTensor(outer[0](tensor), 0, outer[1])
    # Detached: a node that refers to its own output would never be freed.
    return _SavedTensor(tensor.detach(), tensor._version, None)


def _unpack(saved: _SavedWeight | _SavedTensor) -> torch.Tensor:
    if isinstance(saved, _SavedWeight):
        group, weight = saved.group, saved.group.weights[saved.index]
        _check_version(weight.local, saved.version, f"weight {weight.name!r}")
        if not group.full:
            group.gathered.acquire(group)
        return group.full[saved.index].as_strided(saved.size, saved.stride, saved.offset)
    if saved.unpack is not None:
        return saved.unpack(saved.value)
    value: torch.Tensor = saved.value
    _check_version(value, saved.version, f"a tensor of {value.dtype}")
    return value


def _check_version(tensor: torch.Tensor, expected: int, what: str) -> None:
    """Check that a saved tensor was not changed in place: torch's own check does not cover what hooks return."""
    if tensor._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what} is at version {tensor._version}; expected version {expected}"
        )


def _set(owner: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Put any tensor in place of a parameter."""
    if isinstance(owner, torch.nn.RNNBase):  # it has a list of its parameters
        position = owner._flat_weights_names.index(name)
        owner._flat_weights[position] = value
    owner._parameters[name] = value  # type: ignore[assignment]

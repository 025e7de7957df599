"""Sharded parameters: each rank holds the block of a weight that it works with, and its optimizer state.

A sharded parameter is a DistTensor in the module's own attribute. Its shape is the global one, and torch's optimizers
and gradient clipping run distributed operators on it. ``state_dict()`` of modules and of optimizers returns full
tensors under the usual names, and ``load_state_dict`` takes them; both are collective.

Source: Dryden et al. 2019, III-D (weights partitioned over channels and filters).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from distconv.autograd.graph_nodes import mark_leaf
from distconv.communication import gradient_reduction
from distconv.distribution import Distribution
from distconv.grid import ProcessGrid
from distconv.parameters.channel_split import AXIS, ChannelSplit, channel_split, groups_divide
from distconv.parameters.gathered_layers import gather_for_layers
from distconv.parameters.sharded_axes import sharded_axes
from distconv.parameters.state_tensor import gather_state_tensor
from distconv.parameters.weight_groups import AXIS as SHARDED
from distconv.parameters.weight_groups import ShardedWeight
from distconv.tensor import DistTensor, to_distribution


def shard_parameters(
    model: torch.nn.Module,
    layers: Mapping[str, tuple[torch.nn.Module, ProcessGrid]],
    sharded: Mapping[str, str | bool] | None = None,
    prepare: Callable[[str, torch.nn.Module], None] | None = None,
) -> None:
    """Replace the parameters of layers by this rank's blocks: over channels, and over axes that would replicate them.

    The parameters stay the same Python objects, so an existing optimizer keeps them. Convolutions whose groups do not
    divide over the ranks along ``c`` keep weights that are replicated along ``c``. Collective at the first use of a
    split on a grid.

    Parameters
    ----------
    model : Module
        The model.
    layers : mapping of str to (Module, ProcessGrid)
        Its layers with their grids, by name. The parameters are identical on all ranks.
    sharded : mapping of str to str or bool, optional
        Further axes over which the parameters of layers are sharded, as :func:`.sharded_axes` takes them, by name.
    prepare : callable, optional
        Called with name and module before the parameters of a module are sharded, for all modules of the model.
    """
    # All layouts first: a layer that cannot be split raises before any parameter is changed.
    layouts = {name: _layouts(module, grid) for name, (module, grid) in layers.items()}
    axes = {name: sharded_axes(grid, (sharded or {}).get(name, False)) for name, (_, grid) in layers.items()}
    gathered: list[tuple[torch.nn.Module, str, ShardedWeight]] = []
    for name, module in model.named_modules():
        if prepare is not None:
            prepare(name, module)
        if name not in layers:
            continue
        grid, changed = layers[name][1], False
        if axes[name]:
            _release_parameters(module)
        for key, parameter in module._parameters.items():
            # A parameter that two layers share is sharded once.
            shared = [weight for _, _, weight in gathered if id(weight.parameter) == id(parameter)]
            if shared:
                gathered.append((module, key, shared[0]))
            if parameter is None or isinstance(parameter, DistTensor):
                continue
            used, full_name = layouts[name].get(key), f"{name}.{key}".lstrip(".")
            stored = _stored_layout(used, grid, axes[name], parameter.shape)
            if stored is not None:
                _shard_in_place(parameter, stored[0], full_name)
                weight = ShardedWeight(full_name, parameter, used, stored[1], grid, axes[name])
                gathered.append((module, key, weight))
            elif used is not None:
                _shard_in_place(parameter, used, full_name)
            changed |= stored is not None or used is not None
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in module._flat_weights]
        if changed:
            module.register_state_dict_post_hook(_gather_state_dict)
            _register_optimizer_hook()
    if gathered:
        gather_for_layers(model, gathered)


def _release_parameters(module: torch.nn.Module) -> None:
    """Remove references to parameters that would prevent them from becoming DistTensors."""
    if isinstance(module, torch.nn.RNNBase):
        module._flat_weight_refs = []
    for key, value in vars(module).items():
        # A weight that each forward pass computes from parameters, as weight norm does.
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            vars(module)[key] = value.detach()


def _stored_layout(
    used: Distribution | None, grid: ProcessGrid, axes: tuple[str, ...], shape: torch.Size
) -> tuple[Distribution, int] | None:
    """Return the layout in which ranks keep a parameter, and the dimension that is sharded over ``axes``.

    ``used``: the layout over channels in which the layer uses it, or None. None if no dimension is left to be sharded.
    """
    split = (None,) * len(shape) if used is None else used.split
    free = [dim for dim, axis in enumerate(split) if axis is None and shape[dim] > 0]
    # A vector over ``c`` is not split further, and scalars are not split at all.
    if not axes or not free or (used is not None and max(shape[dim] for dim in free) == 1):
        return None
    dim = max(free, key=lambda dim: shape[dim])
    first, second = (1, 1) if used is None else (used.grid.shape["w"], used.grid.shape["c"])
    of_weights = grid.factored(first, second, axes)
    return Distribution(of_weights, [SHARDED if each == dim else axis for each, axis in enumerate(split)]), dim


def _layouts(module: torch.nn.Module, grid: ProcessGrid) -> dict[str, Distribution]:
    """Return the distribution of each parameter of ``module`` that is to be sharded over ``grid``."""
    parts = grid.shape[AXIS]
    weight = module._parameters.get("weight")
    # A parametrized weight (weight norm, spectral norm) stays replicated. Reading module.weight would compute it.
    if parts == 1 or weight is None:
        return {}
    vector = Distribution(grid, (AXIS,))
    if isinstance(module, _BatchNorm):
        return {"weight": vector, "bias": vector}
    if isinstance(module, torch.nn.Linear):
        split = channel_split(module.in_features, module.out_features, 1, parts)
        return {"weight": split.weight_layout(grid, weight.shape), "bias": vector}
    if isinstance(module, _ConvNd) and groups_divide(module.groups, module.out_channels, parts):
        transposed = isinstance(module, _ConvTransposeNd)
        layout = convolution_split(module, parts).weight_layout(grid, weight.shape, transposed=transposed)
        return {"weight": layout, "bias": vector}
    return {}


def convolution_split(module: _ConvNd, parts: int) -> ChannelSplit:
    """Return the split of the channels and filters of a convolution, transposed or not, over ``parts`` ranks.

    Parameters
    ----------
    module : _ConvNd
        Convolution of any number of dimensions.
    parts : int
        Number of ranks along the axis ``c``.

    Returns
    -------
    ChannelSplit
    """
    transposed = isinstance(module, _ConvTransposeNd)
    channels, filters = module.in_channels, module.out_channels
    return channel_split(channels, filters, module.groups, parts, tuple(module.stride), transposed=transposed)


def _shard_in_place(parameter: torch.Tensor, layout: Distribution, name: str) -> None:
    """Make ``parameter`` a DistTensor under ``layout`` without changing which Python object it is."""
    block = tuple(slice(i.start, i.stop) for i in layout.box(None, parameter.shape))
    # A clone: a view would keep the full weight in memory.
    local = parameter.detach()[block].clone().requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        local.grad = parameter.grad[block].clone()
        parameter.grad = None
    if parameter.requires_grad:
        gradient_reduction.defer_grad_reduction(local, name)
    sharded = DistTensor(local, layout, parameter.shape)
    mark_leaf(local, (layout, parameter.shape))
    sharded._is_param = True  # isinstance(..., torch.nn.Parameter) checks this attribute
    with torch._C.DisableTorchFunctionSubclass():
        # Optimizers and tied layers refer to the parameter. It stays the same object, with other content.
        torch.utils.swap_tensors(parameter, sharded)


def _gather_state_dict(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Post-hook of a module's ``state_dict``: replace sharded parameters by full tensors. Collective."""
    # With keep_vars=True the caller wants the parameters themselves.
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for name, value in state.items():
        if name.startswith(prefix) and id(value) not in own:
            state[name] = gather_state_tensor(value)


# -- optimizers -------------------------------------------------------------------------------------------------------

_optimizer_hook_registered = False


def _register_optimizer_hook() -> None:
    global _optimizer_hook_registered
    if not _optimizer_hook_registered:
        register_optimizer_step_pre_hook(_before_step)
        _optimizer_hook_registered = True


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Pre-hook of every optimizer's step: shard state that is full, and register the hook that gathers it.

    State is full if it came from a checkpoint, or is older than the sharding of the parameters.
    """
    sharded = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DistTensor)]
    for parameter in sharded:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            # torch makes some state full, such as that of a loaded checkpoint. Step counts have another shape and stay
            # plain.
            if isinstance(value, torch.Tensor) and not isinstance(value, DistTensor) and value.shape == parameter.shape:
                # A clone, since the block of a full tensor may be a view that keeps it in memory.
                state[key] = to_distribution(value, parameter.dist).clone()
    # A wrapper of an optimizer may lack the hooks of torch's class. Its inner optimizer has them.
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if sharded and hooks is not None and _gather_optimizer_state not in hooks.values():
        optimizer.register_state_dict_post_hook(_gather_optimizer_state)


def _gather_optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Post-hook of an optimizer's ``state_dict``: replace sharded state by full tensors. Collective."""
    state = {
        number: {key: gather_state_tensor(value) for key, value in entries.items()}
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}

"""Sharded parameters: each rank holds the block of a weight that it works with, and its optimizer state with it.

A sharded parameter is a DistTensor in the module's own attribute: its shape is the global one, torch's optimizers and
gradient clipping meet distributed operators through it. ``state_dict()`` of modules and of optimizers gives whole
tensors under the usual names, and ``load_state_dict`` takes them; both are collective.

Source: Dryden et al. 2019, III-D (weights partitioned over channels and filters).
"""

from __future__ import annotations

from collections.abc import Mapping
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
from distconv.parameters.state_tensor import whole_of
from distconv.tensor import DistTensor, laid_out


def shard(layers: Mapping[str, tuple[torch.nn.Module, ProcessGrid]]) -> None:
    """Leave of the parameters of each layer what this rank works with when the layer's grid splits its channels.

    They stay the same objects, so an optimizer made before still has them.

    Convolutions whose groups do not divide over the ranks along ``c`` keep whole weights.
    """
    layouts = {name: _layouts(module, grid) for name, (module, grid) in layers.items()}
    for name, (module, _) in layers.items():
        for key, layout in layouts[name].items():
            parameter = module._parameters.get(key)
            if parameter is not None and not isinstance(parameter, DistTensor):
                _replace(parameter, layout, f"{name}.{key}".lstrip("."))
        if layouts[name]:
            module.register_state_dict_post_hook(_whole_in_place)
            _watch_optimizers()


def _layouts(module: torch.nn.Module, grid: ProcessGrid) -> dict[str, Distribution]:
    """Layout of each parameter of ``module`` that is to be sharded over ``grid``."""
    parts = grid.shape[AXIS]
    weight = module._parameters.get("weight")
    # A weight that is computed (weight norm, spectral norm) stays whole, and asking for it would compute it.
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
    """How a convolution, transposed or not, splits its channels and filters over ``parts`` ranks."""
    transposed = isinstance(module, _ConvTransposeNd)
    channels, filters = module.in_channels, module.out_channels
    return channel_split(channels, filters, module.groups, parts, tuple(module.stride), transposed=transposed)


def _replace(parameter: torch.Tensor, layout: Distribution, name: str) -> None:
    """Make ``parameter``, whole until now, a DistTensor under ``layout`` without changing which object it is."""
    block = tuple(slice(i.start, i.stop) for i in layout.box(None, parameter.shape))
    local = parameter.detach()[block].clone().requires_grad_(parameter.requires_grad)
    if parameter.grad is not None:
        local.grad = parameter.grad[block].clone()
        parameter.grad = None
    if parameter.requires_grad:
        gradient_reduction.defer_grad_reduction(local, name)
    sharded = DistTensor(local, layout, parameter.shape)
    mark_leaf(local, (layout, parameter.shape))
    sharded._is_param = True  # what isinstance(..., torch.nn.Parameter) looks at
    with torch._C.DisableTorchFunctionSubclass():
        torch.utils.swap_tensors(parameter, sharded)


def _whole_in_place(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    # With keep_vars=True the caller wants the parameters themselves.
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for name, value in state.items():
        if name.startswith(prefix) and id(value) not in own:
            state[name] = whole_of(value)


# -- optimizers -------------------------------------------------------------------------------------------------------

_watching = False


def _watch_optimizers() -> None:
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_before_step)
        _watching = True


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Shard what state came whole (from a checkpoint, or from before the parameters were), and see it saved whole."""
    sharded = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DistTensor)]
    for parameter in sharded:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, DistTensor) and value.shape == parameter.shape:
                state[key] = laid_out(value, parameter.dist).clone()
    # An optimizer that wraps another may be one without having been made as one: the inner one's state is seen to.
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    if sharded and hooks is not None and _whole_state not in hooks.values():
        optimizer.register_state_dict_post_hook(_whole_state)


def _whole_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {key: whole_of(value) for key, value in entries.items()}
        for number, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}

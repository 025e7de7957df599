"""Layers on the device ``meta``: memory and values for one layer at a time.

A model that does not fit on a rank is built on ``meta``. :func:`distconv.parallelize` initializes a layer and shards it
before it initializes the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distconv.errors import UnsupportedOperation


def has_meta_tensors(module: torch.nn.Module) -> bool:
    """Return True if a parameter or buffer of the module itself is on the device ``meta``."""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def initialize_layer(
    name: str, module: torch.nn.Module, init: Callable[[torch.nn.Module], object]
) -> dict[str, torch.Tensor]:
    """Give a module's own parameters and buffers on ``meta`` memory on torch's default device, and values.

    Parameters stay the same Python objects.

    Parameters
    ----------
    name : str
        Name of the module.
    module : Module
        The module. Its submodules are left as they are.
    init : callable
        Called with the module. It assigns the values, as ``reset_parameters`` does.

    Returns
    -------
    dict of str to Tensor
        The tensors that were initialized, by full name.

    Raises
    ------
    UnsupportedOperation
        If ``init`` leaves a tensor without values.
    """
    empty: dict[str, tuple[torch.Tensor, int]] = {}
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            # Tied layers refer to the parameter.
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(_make_empty(parameter), parameter.requires_grad))
            empty[key] = parameter, parameter._version
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = values = _make_empty(buffer)
            empty[key] = values, values._version
    init(module)
    owned = module._parameters | module._buffers
    for key, (tensor, version) in empty.items():
        if owned.get(key) is tensor and tensor._version == version and _is_marked(tensor):
            raise UnsupportedOperation(
                f"parallelize: init leaves {_full_name(name, key)!r} ({type(module).__name__}) without values. Assign "
                "all parameters and buffers of the module in place, such as by reset_parameters()"
            )
    return {_full_name(name, key): tensor for key, tensor in owned.items() if key in empty and tensor is not None}


def _full_name(name: str, key: str) -> str:
    return f"{name}.{key}".lstrip(".")


def _make_empty(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the default device with values by which :func:`_is_marked` recognizes it."""
    values = torch.empty_like(like, device=torch.get_default_device())
    if values.is_floating_point() or values.is_complex():
        values.fill_(torch.nan)
    elif values.dtype != torch.bool:
        values.fill_(torch.iinfo(values.dtype).min)
    return values


def _is_marked(values: torch.Tensor) -> bool:
    """Return True if a tensor still has the values of :func:`_make_empty`. A tensor of bools has none."""
    if values.is_floating_point() or values.is_complex():
        return bool(values.isnan().all())
    return values.dtype == torch.bool or bool((values == torch.iinfo(values.dtype).min).all())

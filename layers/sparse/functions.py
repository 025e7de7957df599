"""Functions of torch that apply to features alone.

Each of them computes every site independently, or is batch norm over all sites. Other functions raise
UnsupportedOperation: applied to the features they would run, but compute something else. ``SparseTensor`` calls this
module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from distconv.errors import UnsupportedOperation

Function = Callable[..., Any]

_ACTIVATIONS = """celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu leaky_relu_ logsigmoid mish prelu
    relu relu6 relu_ rrelu selu silu softplus softshrink softsign tanhshrink _threshold alpha_dropout batch_norm dropout
    linear"""
_ELEMENTWISE = "abs celu clamp clone exp log neg prelu relu relu_ selu sigmoid sqrt square tanh"

SITE_BY_SITE = {getattr(F, name) for name in _ACTIVATIONS.split()} | {getattr(torch, n) for n in _ELEMENTWISE.split()}
"""Functions of one sparse operand, the first. Each computes every site independently, apart from batch norm."""

BINARY = {getattr(module, name) for module in (torch, torch.Tensor) for name in "add sub mul div".split()} | {
    getattr(torch, name) for name in "rsub pow maximum minimum true_divide".split()
}
"""Elementwise functions of two operands."""


def call_on_features(
    func: Function, sparse: Sequence[bool], args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Call a function on features.

    Parameters
    ----------
    func : callable
        A function of torch.
    sparse : sequence of bool
        True for each operand that is the features of a sparse tensor.
    args : sequence
        The operands, with features (N, C) in place of sparse tensors, and further arguments.
    kwargs : dict
        Keyword arguments.

    Returns
    -------
    Tensor
        Features (N, C') of the same sites.

    Raises
    ------
    UnsupportedOperation
        If the function does not work site by site, or not with these operands.
    """
    if func not in _KNOWN:
        raise_unsupported(func, "of a sparse tensor")
    if func in BINARY:
        _check_operands(func, sparse, args)
    # All operands of torch.cat must be sparse. Of other functions exactly the first one must be.
    elif list(sparse) != [func is torch.cat or n == 0 for n in range(len(sparse))]:
        raise_unsupported(func, "of a plain tensor in place of a sparse one, or the reverse,")
    if func in _CHECKS:
        _CHECKS[func](func, args, kwargs)
    # Of a DistTensor: no site on any rank, so all ranks agree in this branch.
    if func is F.batch_norm and not len(args[0]):
        return _batch_norm_without_sites(*args, **kwargs)
    result: torch.Tensor = func(*args, **kwargs)
    return result


def raise_unsupported(func: Function, what: str) -> NoReturn:
    """Raise an error with a suggested fix.

    Parameters
    ----------
    func : callable
    what : str
        Description of the operands, which follows the name of the function in the message.

    Raises
    ------
    UnsupportedOperation
        Always.
    """
    name = getattr(func, "__name__", str(func))
    raise UnsupportedOperation(
        f"{name} {what} has no rule. Use the layers of distconv.layers.sparse, or, for a function of each site alone, "
        "x.replace(function(x.features))."
    )


def _check_operands(func: Function, sparse: Sequence[bool], args: Sequence[Any]) -> None:
    """Check that plain operands are scalars or have one value for each channel.

    A plain operand (N, C) is rejected, because it would depend on the order of sites.
    """
    channels = max(x.shape[1] for x, is_sparse in zip(args, sparse, strict=True) if is_sparse)
    for x, is_sparse in zip(args, sparse, strict=True):
        if is_sparse and x.shape[1] not in (1, channels):
            raise_unsupported(func, f"of sparse tensors with {channels} and {x.shape[1]} channels")
        if not is_sparse and isinstance(x, torch.Tensor) and tuple(x.shape) not in ((), (1,), (channels,)):
            raise_unsupported(
                func, f"of a sparse tensor and a tensor of shape {tuple(x.shape)}, not one value per channel,"
            )


def _check_channels(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim not in (1, -1):
        raise_unsupported(func, f"over dim={dim} of a sparse tensor")


def _check_layer_norm(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if len(shape) != 1:
        raise_unsupported(func, f"over {tuple(shape)} of a sparse tensor")


_CHECKS = {
    F.softmax: _check_channels,
    torch.softmax: _check_channels,
    F.log_softmax: _check_channels,
    torch.log_softmax: _check_channels,
    F.layer_norm: _check_layer_norm,
    F.rms_norm: _check_layer_norm,
    torch.cat: _check_channels,
}


_KNOWN = BINARY | SITE_BY_SITE | _CHECKS.keys()


def _batch_norm_without_sites(
    features: torch.Tensor,
    running_mean: Any,
    running_var: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Compute batch norm without sites. torch would set the running statistics to NaN."""
    out = features if weight is None else features * weight
    return out if bias is None else out + bias

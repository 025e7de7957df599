"""``ScanSequential``: a chain of layers whose backward pass is a scan over their transposed Jacobians.

Forward is that of ``nn.Sequential``. In backward, the gradients of all activations come from
:func:`distconv.kernels.scan.backpropagate`. The gradients of the parameters follow; they are independent of one another
(Eq. 2). Tensors are local: this module does not communicate.

Source: BPPSA, Eqs. 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_weight

from distconv.autograd.derivatives import first_order_only
from distconv.errors import UnsupportedOperation
from distconv.kernels import jacobian
from distconv.kernels.scan import Identity, backpropagate
from distconv.kernels.scan.backpropagation import Method
from distconv.kernels.scan.elements import Matrix


class ScanSequential(nn.Sequential):
    """``nn.Sequential`` with a backward pass by scan.

    Supports Conv2d, Linear, ReLU, Tanh, MaxPool2d, AvgPool2d, Flatten, Identity, and Dropout with p=0. Parameters and
    ``state_dict`` are those of ``nn.Sequential(*layers)``; ``ScanSequential(*model)`` shares them.

    Parameters
    ----------
    *layers : nn.Module
    method : str
        As in :func:`distconv.kernels.scan.backpropagate`.
    depth : int, optional
        As in :func:`distconv.kernels.scan.backpropagate`.

    Raises
    ------
    UnsupportedOperation
        If a layer, or an option of it, is not supported.
    """

    def __init__(self, *layers: nn.Module, method: Method = "auto", depth: int | None = None) -> None:
        super().__init__(*layers)
        self.method, self.depth = method, depth
        for index, layer in enumerate(layers):
            if reason := _unsupported_reason(layer):
                raise UnsupportedOperation(f"ScanSequential: layer {index}, {layer}: {reason}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer for ``x`` (B, ...)."""
        out: torch.Tensor = _Chain.apply(x, self, *self.parameters())  # type: ignore[no-untyped-call]
        return out


class _Chain(torch.autograd.Function):
    """The chain as a function of x and the parameters."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: ScanSequential, *parameters: nn.Parameter) -> torch.Tensor:
        activations = [x]
        for layer in model:
            activations.append(layer(activations[-1]))
        ctx.model, ctx.parameters = model, parameters
        ctx.save_for_backward(*activations)
        return activations[-1]

    @staticmethod
    @first_order_only("ScanSequential")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layers, activations = list(ctx.model), ctx.saved_tensors
        first = 0 if ctx.needs_input_grad[0] else 1  # Only the gradient of x needs the first layer's Jacobian.
        chain = [transposed_jacobian(layers[i], *activations[i : i + 2]) for i in reversed(range(first, len(layers)))]
        flat = gradient.flatten(1)
        scanned = backpropagate(flat, chain, ctx.model.method, depth=ctx.model.depth) if chain else []
        outputs = [flat, *scanned]  # Gradients of the last layer's output, ..., of the first layer's output (and of x).
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for i, g in enumerate(reversed(outputs[: len(layers)])):
            for parameter, value in _parameter_gradients(layers[i], activations[i], g.view_as(activations[i + 1])):
                # A parameter that several layers share has the sum of their gradients.
                sums[parameter] = sums[parameter] + value if parameter in sums else value
        dx = scanned[-1].view_as(activations[0]) if first == 0 else None
        return dx, None, *(sums.get(parameter) for parameter in ctx.parameters)


def transposed_jacobian(layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Matrix:
    """Return the transposed Jacobian (dy/dx)^T of a layer in the form that a scan requires.

    Parameters
    ----------
    layer : nn.Module
        A layer that :class:`ScanSequential` supports.
    x, y : Tensor
        Its input and its output, (B, ...) each.

    Returns
    -------
    Matrix
    """
    return _JACOBIANS[type(layer)](layer, x, y)


def _convolution_jacobian(layer: Any, x: torch.Tensor, y: torch.Tensor) -> Matrix:
    windows = jacobian.Windows.build(x.shape[2:], layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return jacobian.batched_conv2d(layer.weight, x.shape[1], windows, layer.groups)


def _max_pool_jacobian(layer: Any, x: torch.Tensor, y: torch.Tensor) -> Matrix:
    options = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    # Computed again, because the layer returned the maxima without the positions, which are the Jacobian's ones.
    _, indices = F.max_pool2d(x, *options, layer.ceil_mode, return_indices=True)
    windows = jacobian.Windows.build(x.shape[2:], *options, ceil=layer.ceil_mode)
    return jacobian.batched_max_pool2d(indices, windows, x.dtype)


def _avg_pool_jacobian(layer: Any, x: torch.Tensor, y: torch.Tensor) -> Matrix:
    windows = jacobian.Windows.build(x.shape[2:], layer.kernel_size, layer.stride, layer.padding, 1)
    return jacobian.batched_avg_pool2d(x.shape[1], windows, x.dtype, x.device)


_JacobianRule = Callable[[Any, torch.Tensor, torch.Tensor], Matrix]

_JACOBIANS: dict[type[nn.Module], _JacobianRule] = {
    nn.Conv2d: _convolution_jacobian,
    nn.Linear: lambda layer, x, y: layer.weight.t()[None],
    nn.ReLU: lambda layer, x, y: jacobian.batched_relu(y),
    nn.Tanh: lambda layer, x, y: jacobian.batched_tanh(y),
    nn.MaxPool2d: _max_pool_jacobian,
    nn.AvgPool2d: _avg_pool_jacobian,
    nn.Flatten: lambda layer, x, y: Identity(),
    nn.Identity: lambda layer, x, y: Identity(),
    nn.Dropout: lambda layer, x, y: Identity(),
}


def _unsupported_reason(layer: Any) -> str:
    """Return the reason why a layer is not supported; empty if it is."""
    if type(layer) not in _JACOBIANS:
        return f"no rule for this layer. Supported are {', '.join(rule.__name__ for rule in _JACOBIANS)}"
    if isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return "padding must be given in numbers, and with zeros"
    if isinstance(layer, nn.MaxPool2d) and layer.return_indices:
        return "return_indices is not supported; leave it out"
    if isinstance(layer, nn.AvgPool2d) and (layer.ceil_mode or layer.divisor_override or not layer.count_include_pad):
        return "only means over complete windows are supported; omit ceil_mode, count_include_pad, divisor_override"
    if isinstance(layer, nn.Dropout) and layer.p:
        return "the dropped elements would differ between passes; use p=0"
    return ""


def _parameter_gradients(layer: Any, x: torch.Tensor, g: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Return a layer's parameters with their gradients, given its input and the gradient of its output (Eq. 2)."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if isinstance(layer, nn.Conv2d):
        weight = conv2d_weight(x, layer.weight.shape, g, layer.stride, layer.padding, layer.dilation, layer.groups)
        pairs.append((layer.weight, weight))
    elif isinstance(layer, nn.Linear):
        pairs.append((layer.weight, g.t() @ x))
    if getattr(layer, "bias", None) is not None:
        pairs.append((layer.bias, g.sum([d for d in range(g.dim()) if d != 1])))
    return pairs

"""Pairs of recurrent modules of torch and of distconv with the same parameters."""

from __future__ import annotations

import copy

import torch
from torch import nn

from distconv.layers.recurrent import ScanGRU, ScanRNN

KINDS = {
    "tanh": (nn.RNN, ScanRNN, {}),
    "relu": (nn.RNN, ScanRNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, ScanGRU, {}),
}
METHODS = ("auto", "sequential", "blelloch", "truncated", "autograd")
SMALL = {"rtol": 1e-10, "atol": 1e-12}


def torch_and_scan_modules(
    kind: str, *sizes: int, method: str = "auto", **options: object
) -> tuple[nn.RNNBase, nn.RNNBase]:
    """Torch's module and ours, in float64."""
    theirs, ours, own = KINDS[kind]
    torch.manual_seed(3)
    one = theirs(*sizes, **own, **options).double()
    other = ours(*sizes, method=method, **own, **options).double()
    other.load_state_dict(one.state_dict())
    return one, other


def gradients(module: nn.Module, results: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results, and gradients of leaves and parameters of what depends on each value of them."""
    total = sum(
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(i), dtype=y.dtype)).sum()
        for i, y in enumerate(results)
    )
    module.zero_grad()
    total.backward()
    found = [*results, *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())]
    return [copy.copy(t.detach()) for t in found]

"""One sample in one process or over ranks: its results, and its gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from distconv.communication.transport import Traffic, counted
from distconv.distribution import Distribution
from distconv.errors import ReplicationWarning
from distconv.grid import ProcessGrid
from distconv.jobs.verification.differential.verdicts import Refusal, refusal
from distconv.jobs.verification.torch_samples.database import Sample, can_be_split, seed
from distconv.layers.plumbing import call_site
from distconv.placement import scatter
from distconv.tensor import DistTensor


@dataclass(frozen=True)
class Split:
    """How the tensors of a sample are split: the grid axis of their first and last dimensions."""

    name: str
    first: str | None
    last: str | None
    every: bool
    """Every tensor, or only the first; the others are plain."""

    def put(self, value: torch.Tensor, grid: ProcessGrid) -> torch.Tensor:
        """``value`` distributed."""
        axes = [self.first, *[None] * (value.dim() - 2), self.last] if value.dim() > 1 else [self.first or self.last]
        x = scatter(value, Distribution(grid, axes))
        return DistTensor(x.local.detach(), x.dist, x.shape)

    def gradient(self, whole: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The gradient of the result ``y`` as its backward pass takes it."""
        return whole


@dataclass(frozen=True)
class Found:
    """What came of a sample on this rank."""

    refused: Refusal | None
    values: dict[str, torch.Tensor]
    traffic: Traffic
    warned: bool
    """Whether something was computed by every rank as a whole."""


def attempt(sample: Sample, together: Callable[[bool], bool], split: Split | None, grid: ProcessGrid | None) -> Found:
    """Compute ``sample`` and its gradients; without ``split`` in one process.

    ``together`` says whether something failed on any rank, given whether it did here.
    """
    refused, values = None, dict[str, torch.Tensor]()
    call_site.forget()
    with warnings.catch_warnings(record=True) as told, counted() as traffic:
        warnings.simplefilter("always")
        try:
            values = _computed(sample, together, split, grid)
        except Exception as error:
            refused = refusal(error)
    return Found(refused, values, traffic, any(issubclass(w.category, ReplicationWarning) for w in told))


class OthersRaise(Exception):
    """Forward raised, but not on this rank."""


def _computed(
    sample: Sample, together: Callable[[bool], bool], split: Split | None, grid: ProcessGrid | None
) -> dict[str, torch.Tensor]:
    failed = True
    try:
        args, kwargs = _put((sample.args, sample.kwargs), split, grid)
        module = None if sample.module is None else sample.module()
        seed()
        result = sample.function(*([] if module is None else [module]), *args, **kwargs)
        failed = False
    finally:
        # Else backward would wait for the others for ever.
        elsewhere = together(failed)
    if elsewhere:
        raise OthersRaise
    answers = [y for y in tree_leaves(result) if isinstance(y, (torch.Tensor, bool, int, float))]
    outputs = [y if isinstance(y, torch.Tensor) else torch.tensor(y) for y in answers]
    _backward([y for y in outputs if y.requires_grad], split)
    values = {f"y{number}": _strided(y) for number, y in enumerate(outputs)}
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    values |= {f"dL/dx{number}": _strided(x.grad) for number, x in enumerate(inputs) if x.grad is not None}
    if module is not None:
        values |= {f"dL/d{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
        values |= dict(module.named_buffers())
    return values


def _put(given: Any, split: Split | None, grid: ProcessGrid | None) -> Any:
    """Copies of all tensors, those distributed that ``split`` says."""
    first = next((x for x in tree_leaves(given) if can_be_split(x)), None)

    def put(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copied = value.detach().clone()
        if split is not None and grid is not None and can_be_split(value) and (split.every or value is first):
            copied = split.put(copied, grid)
        return copied.requires_grad_(value.requires_grad)

    return tree_map(put, given)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _backward(outputs: list[torch.Tensor], split: Split | None) -> None:
    generator = torch.Generator().manual_seed(3)
    for y in outputs:
        dense = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        whole = (torch.complex(dense, dense.flip(0) if dense.dim() else dense) if y.is_complex() else dense).to(y.dtype)
        y.backward(whole if split is None else split.gradient(whole, y), retain_graph=y is not outputs[-1])

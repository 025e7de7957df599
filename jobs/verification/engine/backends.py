"""The backends that compute a case: one process with plain tensors, and the ranks with distributed ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from distconv.distribution import default_axes
from distconv.grid import ProcessGrid
from distconv.jobs.verification.engine.layouts import CaseLayout
from distconv.parallel import parallelize
from distconv.placement import gather, scatter
from distconv.tensor import DistTensor

Dims = str | Sequence[str | None] | None
"""Grid axis of each dimension, or None if the dimension is not split.

A string of several axes, such as ``"nw"``, selects the first of them that the grid splits.
"""

_SEED = 5


class OthersRaise(Exception):
    """Something failed, but not on this rank."""


def seed() -> None:
    """Seed torch, so that it draws the same numbers on all backends."""
    torch.default_generator.manual_seed(_SEED)


def _inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _random_like(y: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # Of the global shape, on every rank: all backends and grids have the same numbers.
    dense = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return (torch.complex(dense, dense.flip(0) if dense.dim() else dense) if y.is_complex() else dense).to(y.dtype)


class ReferenceBackend:
    """One process with plain torch.

    A case calls these methods instead of creating tensors itself, so that the same code runs on both backends. Tensors
    to compare are in ``results``.
    """

    def __init__(self, layout: CaseLayout) -> None:
        self.layout, self.results = layout, dict[str, torch.Tensor]()

    def put(self, value: torch.Tensor, dims: Dims = None, grad: bool = True, *, balanced: bool = False) -> torch.Tensor:
        """Return a copy of a tensor as an input, which is distributed over ranks.

        Parameters
        ----------
        value : torch.Tensor
            The full tensor.
        dims : Dims
            Grid axes that may split each dimension.
        grad : bool
            True for a tensor that requires a gradient.
        balanced : bool
            True for blocks whose sizes differ by at most one, whatever the layout requires.

        Returns
        -------
        torch.Tensor
        """
        return self.plain(self.layout.in_memory_format(value), grad)

    def plain(self, value: torch.Tensor, grad: bool = True) -> torch.Tensor:
        """Return a copy of a tensor as every rank has it, like a parameter.

        Parameters
        ----------
        value : torch.Tensor
            The tensor.
        grad : bool
            True for a tensor that requires a gradient.

        Returns
        -------
        torch.Tensor
        """
        return value.detach().clone().requires_grad_(grad and _inexact(value))

    def model(self, module: nn.Module, parallel: bool = True) -> nn.Module:
        """Return the module; over ranks it is parallelized.

        Parameters
        ----------
        module : torch.nn.Module
        parallel : bool
            False leaves the module as it is.

        Returns
        -------
        torch.nn.Module
        """
        return module

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor with the same values, in the autograd graph."""
        return tensor

    def gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of an input or a parameter."""
        return leaf.grad

    def direction(self, whole: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the activation gradient of a result.

        Parameters
        ----------
        whole : torch.Tensor
            The full activation gradient.
        y : torch.Tensor
            The result.

        Returns
        -------
        torch.Tensor
        """
        return whole

    def together(self, failed: bool = False) -> None:
        """Raise on all ranks if any rank failed: backward would wait for the failed ranks. Collective.

        Raises
        ------
        OthersRaise
            If another rank failed.
        """

    def record(self, name: str, tensor: torch.Tensor | None) -> None:
        """Keep a tensor for the comparison; of a distributed one, this rank's block.

        Parameters
        ----------
        name : str
            Name in the results.
        tensor : torch.Tensor or None
        """
        if isinstance(tensor, DistTensor):
            self.results[name] = DistTensor(tensor.local.detach().clone(), tensor.dist, tensor.shape)
        elif tensor is not None:
            tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
            self.results[name] = tensor.detach().clone()

    def differentiate(
        self,
        outputs: torch.Tensor | Sequence[torch.Tensor],
        leaves: Mapping[str, torch.Tensor | None],
        module: nn.Module | None = None,
    ) -> None:
        """Record outputs, gradients of inputs and of a module for random activation gradients, and buffers. Collective.

        Parameters
        ----------
        outputs : torch.Tensor or sequence of torch.Tensor
        leaves : mapping of str to torch.Tensor or None
            Inputs by name.
        module : torch.nn.Module, optional
            Module whose gradients and buffers are recorded.
        """
        self.together()
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        generator = torch.Generator().manual_seed(_SEED + 1)
        differentiable = [y for y in outputs if y.requires_grad]
        for y in differentiable:  # the outputs share a graph, which the last backward pass frees
            y.backward(self.direction(_random_like(y, generator), y), retain_graph=y is not differentiable[-1])
        for number, y in enumerate(outputs):
            self.record(f"y{number}", y)
        for name, leaf in leaves.items():
            self.record(f"dL/d{name}", None if leaf is None else self.gradient(leaf))
        if module is not None:
            for name, parameter in module.named_parameters():
                self.record(f"dL/d{name}", parameter.grad)
            for name, buffer in module.named_buffers():
                self.record(name, buffer)

    def state(self, module: nn.Module) -> None:
        """Record a module's parameters and buffers."""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.record(name, tensor)


class DistributedBackend(ReferenceBackend):
    """The ranks of ``grid``, with inputs split as ``layout`` requires.

    Parameters
    ----------
    grid : ProcessGrid
    layout : CaseLayout
    fails : callable
        Collective. Receives True on ranks that failed, and returns True on all ranks if any rank failed.
    """

    def __init__(self, grid: ProcessGrid, layout: CaseLayout, fails: Callable[[bool], bool]) -> None:
        super().__init__(layout)
        self.grid, self._fails = grid, fails

    def put(self, value: torch.Tensor, dims: Dims = None, grad: bool = True, *, balanced: bool = False) -> torch.Tensor:
        """Return a copy of ``value`` in the layout's distribution of the given or the usual dimensions.

        Parameters
        ----------
        value, dims, grad, balanced
            As in :class:`distconv.jobs.verification.engine.backends.ReferenceBackend`.

        Returns
        -------
        torch.Tensor
        """
        axes = default_axes(None, value.dim()) if dims is None else dims
        value = self.layout.in_memory_format(value)
        x = scatter(value.detach(), self.layout.distribution(self.grid, value.shape, axes, balanced=balanced))
        return x.detach().requires_grad_(grad and _inexact(value))

    def model(self, module: nn.Module, parallel: bool = True) -> nn.Module:
        """Return the module, parallelized.

        Parameters
        ----------
        module, parallel
            As in :class:`distconv.jobs.verification.engine.backends.ReferenceBackend`.

        Returns
        -------
        torch.nn.Module
        """
        return parallelize(module, self.grid) if parallel else module

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor on every rank, in the autograd graph. Collective."""
        return gather(tensor)

    def together(self, failed: bool = False) -> None:
        """Raise on all ranks if any rank failed. Collective.

        Raises
        ------
        OthersRaise
            If another rank failed. On the failed rank the method returns, since its own error is reported.
        """
        if self._fails(failed) and not failed:
            raise OthersRaise("not on this rank")

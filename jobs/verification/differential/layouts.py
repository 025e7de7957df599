"""Draws the grid, and for every input its distribution, how it is passed, and its memory layout."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from distconv.arrangement import AXES
from distconv.distribution import Distribution, default_axes
from distconv.grid import ProcessGrid
from distconv.jobs.verification.engine.backends import Dims, DistributedBackend
from distconv.jobs.verification.engine.layouts import CaseLayout
from distconv.placement import scatter
from distconv.tensor import DistTensor

_ELSEWHERE = 0.06
"""Probability that an input is split over another grid of the same ranks."""


class Drawn(DistributedBackend):
    """The ranks of ``grid``: inputs are scattered in distributions that ``choices`` draws, the same on all ranks.

    A few are scattered over ``other``, which arranges the same ranks in another way.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        layout: CaseLayout,
        fails: Callable[[bool], bool],
        other: ProcessGrid,
        choices: random.Random,
    ) -> None:
        super().__init__(grid, layout, fails)
        self._other, self._choices = other, choices
        self._leaves: list[tuple[torch.Tensor, torch.Tensor | None, int | None]] = []

    def put(self, value: torch.Tensor, dims: Dims = None, grad: bool = True, *, balanced: bool = False) -> torch.Tensor:
        """Return a tensor as an input in a distribution of the given or of drawn dimensions.

        Parameters
        ----------
        value, dims, grad, balanced
            As in :class:`distconv.jobs.verification.engine.backends.ReferenceBackend`.

        Returns
        -------
        torch.Tensor
        """
        dist = self._distribution(value.shape, dims)
        grad = grad and (value.is_floating_point() or value.is_complex())
        leaf: torch.Tensor | None = self._strided(value.detach())
        style = self._choices.choices(["own", "whole", "root"], [6, 3, 1])[0]
        root = self._choices.randrange(self.grid.size) if style == "root" else None
        if root is not None and self.grid.rank != root:
            leaf = None
        if leaf is not None and style != "own":
            leaf.requires_grad_(grad)
        x = scatter(leaf, dist, root=root)
        x._set_layout(dist, x.shape, None)  # row-major as on one process, where random numbers are drawn in that order
        if style == "own":
            x = DistTensor(self._in_memory(x.local.detach()), x.dist, x.shape).requires_grad_(grad)
        self._leaves.append((x, x if style == "own" else leaf, root))
        return x

    def _strided(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``value``, not always contiguous."""
        kind = self._choices.choices(["rows", "turned", "spread"], [8, 1, 1])[0]
        if kind == "turned" and value.dim() > 1:
            return value.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == "spread" and value.dim():
            return value.repeat_interleave(2, dim=-1)[..., ::2]
        return value.clone()

    def _in_memory(self, block: torch.Tensor) -> torch.Tensor:
        """Return ``block``, sometimes with channels last in memory."""
        if block.dim() not in (4, 5) or self._choices.random() > 0.1:
            return block
        return block.contiguous(memory_format=torch.channels_last if block.dim() == 4 else torch.channels_last_3d)

    def _distribution(self, shape: Sequence[int], dims: Dims) -> Distribution:
        grid = self._other if self._choices.random() < _ELSEWHERE else self.grid
        axes = default_axes(None, len(shape)) if dims is None else tuple(letters and letters[0] for letters in dims)
        kind = self._choices.choices(["usual", "partly", "turned"], [85, 11, 4])[0]
        if kind == "partly":
            axes = tuple(axis if self._choices.random() < 0.5 else None for axis in axes)
        elif kind == "turned":
            axes = tuple(self._choices.sample([*AXES, *(None,) * len(axes)], len(axes)))
        named = [(axis, extent) for axis, extent in zip(axes, shape, strict=True) if axis is not None]
        boundaries: dict[str, tuple[int, ...]] = {}
        cyclic: dict[str, int] = {}
        for axis, extent in named:
            kind = self._choices.choices(["balanced", "uneven", "cyclic"], [17, 2, 1])[0]
            if kind == "uneven":
                inner = sorted(self._choices.randint(0, extent) for _ in range(grid.shape[axis] - 1))
                boundaries[axis] = (0, *inner, extent)
            elif kind == "cyclic":
                cyclic[axis] = self._choices.randint(1, 3)
        return Distribution(grid, axes, boundaries=boundaries, cyclic=cyclic)

    def gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of an input or a parameter; from its root if one rank provided the input."""
        for x, given, root in self._leaves:
            if x is leaf:
                grad = None if given is None else given.grad
                return grad if root is None else self.grid.world.bcast(grad, root=root)
        return leaf.grad


_CHANNELS = 0.25
"""Probability that channels are among the axes that a grid may split."""


def draw_extents(ranks: int, spatial: int, choices: random.Random) -> dict[str, int]:
    """Return the axes of a grid: mostly samples and spatial dimensions, sometimes channels.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    spatial : int
        Number of spatial dimensions.
    choices : random.Random
        Source of random choices.

    Returns
    -------
    dict of str to int
    """
    used = ("d", "h", "w")[3 - spatial :]
    weights = {axis: 0.08 for axis in AXES} | {axis: 1.0 for axis in used} | {"n": 0.7}
    weights["c"] = 1.5 if choices.random() < _CHANNELS else 0.0
    extents: dict[str, int] = {}
    for factor in _factors(ranks, choices):
        axis = choices.choices(list(weights), list(weights.values()))[0]
        extents[axis] = extents.get(axis, 1) * factor
    return extents


def _factors(number: int, choices: random.Random) -> list[int]:
    primes = []
    for prime in (2, 3, 5, 7, 11, 13):
        while number % prime == 0:
            primes.append(prime)
            number //= prime
    factors = [*primes, *([number] if number > 1 else [])]
    choices.shuffle(factors)
    return factors

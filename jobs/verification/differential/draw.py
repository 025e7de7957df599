"""Draws cases: all random choices of a case follow from two numbers, so that all ranks draw the same case."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from distconv.jobs.verification.engine.backends import ReferenceBackend

T = TypeVar("T")


@dataclass(frozen=True)
class DrawnProgram:
    """Program of a case, which runs in one process and over ranks."""

    name: str
    text: str
    """Shapes and options in one line."""
    run: Callable[[ReferenceBackend], None]
    spatial: int = 2
    """Spatial dimensions; grids are drawn to split these."""
    as_torch_takes_it: bool = False
    """True if a program that torch rejects is not compared."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Size of each letter, for cases of the conformance table."""
    condition: float = 1.0
    """Factor on the tolerance of the comparison."""
    infinite: bool = False
    """True if an input has infinite values."""


class Draw:
    """A source of random choices, fixed by ``seed`` and the number ``index`` of the case."""

    def __init__(self, seed: int, index: int) -> None:
        self._random = random.Random(f"{seed}/{index}")
        self.seed = self._random.getrandbits(32)
        """For torch's own generator, where modules draw their parameters."""
        self._generator = torch.Generator().manual_seed(self.seed)

    def pick(self, *options: T) -> T:
        """Return one of the options."""
        return self._random.choice(options)

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """Return one of the options, drawn with probabilities in proportion to weights.

        Parameters
        ----------
        options : sequence of T
            Values to draw from.
        weights : sequence of float

        Returns
        -------
        T
        """
        return self._random.choices(options, weights)[0]

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """Return different options, perhaps none.

        Parameters
        ----------
        options : sequence of T
            Values to draw from.
        most : int
            Maximum number of drawn values.

        Returns
        -------
        list of T
        """
        return self._random.sample(options, self.number(0, min(most, len(options))))

    def number(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``, both included.

        Parameters
        ----------
        low : int
        high : int

        Returns
        -------
        int
        """
        return self._random.randint(low, high)

    def numbers(self, count: int, low: int, high: int) -> tuple[int, ...]:
        """Return ``count`` numbers from ``low`` to ``high``, both included.

        Parameters
        ----------
        count : int
        low : int
        high : int

        Returns
        -------
        tuple of int
        """
        return tuple(self.number(low, high) for _ in range(count))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random.random() < probability

    def extents(self, count: int) -> tuple[int, ...]:
        """Return the sizes of ``count`` spatial dimensions: 1 to 20, smaller in 3-D."""
        return self.numbers(count, 1, 20 if count < 3 else 9)

    def tensor(self, *shape: int, ties: bool = False) -> torch.Tensor:
        """Return normal random numbers in float64.

        Parameters
        ----------
        ties : bool
            True rounds them to integers, so that many are equal.
        *shape

        Returns
        -------
        torch.Tensor
        """
        values = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        return values.round() if ties else values

    def classes(self, *shape: int, below: int) -> torch.Tensor:
        """Return random integers in ``range(below)``.

        Parameters
        ----------
        below : int
        *shape

        Returns
        -------
        torch.Tensor
        """
        return torch.randint(0, below, shape, generator=self._generator)


def image(draw: Draw, channels: int, sizes: tuple[int, ...], *, ties: bool = False) -> torch.Tensor:
    """Return one to five samples.

    Parameters
    ----------
    draw : Draw
    channels : int
    sizes : tuple of int
        Sizes of the spatial dimensions.
    ties : bool
        True makes many values equal.

    Returns
    -------
    torch.Tensor
    """
    return draw.tensor(draw.number(1, 5), channels, *sizes, ties=ties)


def on_module(draw: Draw, name: str, text: str, build: Callable[[], nn.Module], x: torch.Tensor) -> DrawnProgram:
    """Return a program that applies a module.

    Sometimes the input is one sample without its dimension; sometimes only a part of the gradients is requested.

    Parameters
    ----------
    draw : Draw
    name : str
        Name of the operator.
    text : str
        Description of the case.
    build : callable
        Builds the module.
    x : torch.Tensor

    Returns
    -------
    DrawnProgram
    """
    parallel, first, frozen = draw.chance(0.5), draw.chance(0.15), draw.chance(0.1)
    single = draw.chance(0.02)
    given_x = x[0] if single else x

    def run(backend: ReferenceBackend) -> None:
        torch.default_generator.manual_seed(draw.seed)
        own = backend.model(build().double().requires_grad_(not frozen), parallel)
        given = backend.put(given_x, grad=not first)
        backend.differentiate(own(given), {"x": given}, own)

    wanted = "dL/dw only" if first else "dL/dx only" if frozen else ""
    return DrawnProgram(name, f"x{tuple(given_x.shape)} {text} {wanted}", run, x.dim() - 2)


def on_function(name: str, text: str, function: Callable[..., Any], x: torch.Tensor) -> DrawnProgram:
    """Return a program that applies a function.

    Parameters
    ----------
    name : str
        Name of the operator.
    text : str
        Description of the case.
    function : callable
    x : torch.Tensor

    Returns
    -------
    DrawnProgram
    """

    def run(backend: ReferenceBackend) -> None:
        given = backend.put(x)
        backend.differentiate(function(given), {"x": given})

    return DrawnProgram(name, f"x{tuple(x.shape)} {text}", run, x.dim() - 2)

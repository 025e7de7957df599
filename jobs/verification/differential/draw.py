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
    """True if there is nothing to compare where torch refuses it."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Extents of what has letters for them."""
    condition: float = 1.0
    infinite: bool = False


class Draw:
    """A source of random choices, fixed by ``seed`` and the number ``index`` of the case."""

    def __init__(self, seed: int, index: int) -> None:
        self._random = random.Random(f"{seed}/{index}")
        self.seed = self._random.getrandbits(32)
        """For torch's own generator, where modules draw their parameters."""
        self._generator = torch.Generator().manual_seed(self.seed)

    def pick(self, *options: T) -> T:
        """One of ``options``."""
        return self._random.choice(options)

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """One of ``options``, more often those of large weight."""
        return self._random.choices(options, weights)[0]

    def some(self, options: Sequence[T], most: int) -> list[T]:
        """At most ``most`` different ones of ``options``, perhaps none."""
        return self._random.sample(options, self.number(0, min(most, len(options))))

    def number(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``, both included."""
        return self._random.randint(low, high)

    def numbers(self, count: int, low: int, high: int) -> tuple[int, ...]:
        """Return ``count`` numbers from ``low`` to ``high``, both included."""
        return tuple(self.number(low, high) for _ in range(count))

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random.random() < probability

    def extents(self, count: int) -> tuple[int, ...]:
        """Sizes of ``count`` spatial dimensions: 1 to 20, smaller in 3-D."""
        return self.numbers(count, 1, 20 if count < 3 else 9)

    def tensor(self, *shape: int, ties: bool = False) -> torch.Tensor:
        """Normal numbers in float64; with ``ties`` whole ones, so that many are equal."""
        values = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        return values.round() if ties else values

    def classes(self, *shape: int, below: int) -> torch.Tensor:
        """Whole numbers in ``range(below)``."""
        return torch.randint(0, below, shape, generator=self._generator)


def image(draw: Draw, channels: int, sizes: tuple[int, ...], *, ties: bool = False) -> torch.Tensor:
    """One to five samples; with ``ties`` many values are equal."""
    return draw.tensor(draw.number(1, 5), channels, *sizes, ties=ties)


def on_module(draw: Draw, name: str, text: str, build: Callable[[], nn.Module], x: torch.Tensor) -> DrawnProgram:
    """A module of ``x``, sometimes of one sample without its dimension, sometimes with a part of the gradients."""
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
    """``function`` of ``x``."""

    def run(backend: ReferenceBackend) -> None:
        given = backend.put(x)
        backend.differentiate(function(given), {"x": given})

    return DrawnProgram(name, f"x{tuple(x.shape)} {text}", run, x.dim() - 2)

"""Cases of the conformance table: an operator with its options, and its inputs with letters instead of sizes.

Inputs are written like ``"N C H W"``, with one word for each dimension:

- ``H``: split over the grid axis h, with the size of h;
- ``h``: not split, with the size of h;
- ``3``: not split, with this size;
- ``W:h``: split over the grid axis w, with the size of h;
- ``C+2``, ``H-1``, ``C=5``: split, with a size that is computed from the letter's or replaces it.

The sizes of the letters depend on the layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from distconv.jobs.verification.engine import runner
from distconv.jobs.verification.engine.backends import ReferenceBackend, seed
from distconv.jobs.verification.engine.layouts import Extents

Sizes = Extents
"""Size of each small letter."""

FEW = ("samples", "height", "samples + space", "uneven", "empty space", "channels + space", "empty channels")
"""Kinds of layouts for a case whose messages are those of another case, so that it differs in its numbers only."""

# Groups: capital, letter of its size, small letter, number; then the change of the size and its amount.
_DIMENSION = re.compile(r"(?:([NCDHW])(?::([ncdhw]))?|([ncdhw])|(\d+))(?:([+=-])(\d+))?$")

_CHANGES: dict[str, Callable[[int, int], int]] = {
    "+": lambda extent, by: extent + by,
    "-": lambda extent, by: extent - by,
    "=": lambda extent, by: by,
}


def _parse_dimension(dimension: str, sizes: Sizes) -> tuple[str | None, int]:
    """Parse a dimension: its grid axis (None if it is not split) and its size."""
    match = _DIMENSION.match(dimension)
    if match is None:
        raise ValueError(
            f"Input: {dimension!r} is not a valid dimension. Write it as the module's docstring describes."
        )
    capital, other, small, number, change, by = match.groups()
    extent = int(number) if number else sizes[other or small or capital.lower()]
    return capital.lower() if capital else None, _CHANGES[change](extent, int(by)) if change else extent


@dataclass(frozen=True)
class Input:
    """One input tensor of a case."""

    dims: str
    """Dimensions, written as the module describes."""
    values: str = "normal"
    """A key of :data:`VALUES`."""
    grad: bool = True
    """True compares its gradient, if its dtype can have one."""
    layout: Literal["split", "balanced", "replicated", "plain"] = "split"
    """Distribution of the input over ranks.

    ``split`` is that of the layout. ``balanced`` splits the same dimensions, but never into uneven or cyclic blocks.
    ``replicated`` is a replicated DistTensor, and ``plain`` an ordinary tensor.
    """
    dtype: torch.dtype | None = None
    """Dtype of the tensor. None selects the dtype of the case."""

    def axes(self) -> tuple[str | None, ...]:
        """Return the grid axis of each dimension, or None if it is not split."""
        if self.layout in ("replicated", "plain"):
            return (None,) * len(self.dims.split())
        return tuple(dimension[0].lower() if dimension[0].isupper() else None for dimension in self.dims.split())

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the global shape."""
        return tuple(_parse_dimension(dimension, sizes)[1] for dimension in self.dims.split())

    def put(
        self, backend: ReferenceBackend, sizes: Sizes, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the input on a backend.

        Parameters
        ----------
        backend : ReferenceBackend
        sizes : Sizes
            Size of each dimension.
        dtype : torch.dtype
        generator : torch.Generator
            Source of random values.

        Returns
        -------
        torch.Tensor
        """
        # The full tensor on every rank, from the same generator: all grids and the reference have the same values.
        values = VALUES[self.values](self.shape(sizes), sizes, generator)
        values = values.to(self.dtype or dtype) if values.is_floating_point() else values
        if self.layout == "plain":
            return backend.plain(values, self.grad)
        return backend.put(values, self.axes(), self.grad, balanced=self.layout == "balanced")


def plain(dims: str, values: str = "normal", **options: Any) -> Input:
    """Return a tensor that every rank has, such as a parameter.

    Parameters
    ----------
    dims : str
        Dimensions, written as the module describes.
    values : str
        A key of ``VALUES``.
    **options
        Further fields of :class:`Input`.

    Returns
    -------
    Input
    """
    return Input(dims, values, layout="plain", **options)


def fixed(dims: str, values: str = "normal", **options: Any) -> Input:
    """Return a split tensor without a gradient, such as a target.

    Parameters
    ----------
    dims : str
        Dimensions, written as the module describes.
    values : str
        A key of ``VALUES``.
    **options
        Further fields of :class:`Input`.

    Returns
    -------
    Input
    """
    return Input(dims, values, grad=False, **options)


@dataclass(frozen=True)
class ConformanceCase(runner.Case):
    """An operator with one choice of options.

    ``operator`` and ``option`` identify a case within its family, in journals and on the page. A case that gets another
    name must be run again for both.
    """

    operator: str
    option: str
    function: Callable[..., Any]
    """Takes the inputs, after the module if there is one, and returns a tensor or several of them."""
    inputs: tuple[Input, ...]
    module: Callable[[Sizes], nn.Module] | None = None
    parallel: bool = False
    """True passes the module to ``dc.parallelize``. Otherwise it remains as built."""
    least: Sizes = field(default_factory=dict)
    """Smallest spatial sizes (default 1) that torch accepts, for the layouts with empty blocks."""
    multiple: int = 1
    """Divisor of the number of channels."""
    dtype: torch.dtype = torch.float64
    sizes: Sizes = field(default_factory=dict)
    """Sizes that replace the usual ones of the layouts."""
    condition: float = 1.0
    """Factor on the tolerance of the comparison, for cases that amplify round-off."""
    kinds: tuple[str, ...] | None = None
    """Kinds of layouts on which the case runs. None selects all kinds that split one of its dimensions."""

    @property
    def axes(self) -> frozenset[str]:
        """Grid axes that split one of its inputs."""
        return frozenset(axis for given in self.inputs for axis in given.axes() if axis)

    @property
    def infinite(self) -> bool:
        """Return True if an input has infinite values."""
        return any("infinit" in given.values for given in self.inputs)

    def compute(self, backend: ReferenceBackend) -> None:
        """Call the function, and differentiate its results."""
        sizes = dict(backend.layout.sizes)
        # Before the parameters, and again before the call: all backends must draw the same numbers in both, although
        # parallelize and the inputs may draw other ones in between.
        seed()
        module = None if self.module is None else self.module(sizes).to(self.dtype)
        generator = torch.Generator().manual_seed(5)
        inputs = [given.put(backend, sizes, self.dtype, generator) for given in self.inputs]
        module = None if module is None else backend.model(module, self.parallel)
        seed()
        result = self.function(*inputs) if module is None else self.function(module, *inputs)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        backend.differentiate(outputs, {f"x{number}": x for number, x in enumerate(inputs)}, module)


def case(
    operator: str, option: str, function: Callable[..., Any], *inputs: Input, **attributes: Any
) -> ConformanceCase:
    """Return a case whose operator is a function.

    Parameters
    ----------
    operator : str
    option : str
        Distinguishes the cases of ``operator``.
    function : callable
        Computes the results from the inputs.
    *inputs
        Instances of :class:`Input`.
    **attributes
        Further fields of :class:`ConformanceCase`.

    Returns
    -------
    ConformanceCase
    """
    return ConformanceCase(operator, option, function, inputs, **attributes)


def _forward(module: nn.Module, *inputs: torch.Tensor) -> Any:
    return module(*inputs)


def modules(
    operator: str, option: str, build: Callable[[Sizes], nn.Module], *inputs: Input, **attributes: Any
) -> list[ConformanceCase]:
    """Return two cases of a module: as built, and after ``dc.parallelize``.

    Parameters
    ----------
    operator : str
    option : str
        Distinguishes the cases of ``operator``.
    build : callable
        Builds the module for the sizes.
    *inputs
        Instances of :class:`Input`.
    **attributes
        Further fields of :class:`ConformanceCase`. ``function`` calls the module; by default with the inputs.

    Returns
    -------
    list of ConformanceCase
    """
    function = attributes.pop("function", _forward)
    usual = ConformanceCase(operator, option, function, inputs, module=build, **attributes)
    return [usual, replace(usual, option=f"{option}, parallelized".removeprefix(", "), parallel=True, kinds=FEW)]


def _random(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _with(special: float) -> Callable[..., torch.Tensor]:
    """Return a function that makes normal random numbers, every eleventh of which is ``special``."""

    def make(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
        values = _random(shape, sizes, generator).reshape(-1)
        values[3::11] = special
        return values.reshape(shape)

    return make


def _sites(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Return normal random numbers at a fifth of the positions, for all channels (N, C, ...), and zeros elsewhere."""
    values = _random(shape, sizes, generator)
    return values * (torch.rand(shape[0], 1, *shape[2:], generator=generator) < 0.2)


VALUES: dict[str, Callable[[tuple[int, ...], Sizes, torch.Generator], torch.Tensor]] = {
    "normal": _random,
    "ties": lambda *given: _random(*given).round(),
    "positive": lambda *given: _random(*given).abs() + 0.1,
    "unit": lambda *given: _random(*given).sigmoid(),
    "above one": lambda *given: _random(*given).abs() + 1.1,
    "far": lambda *given: _random(*given) + 1e6,
    "NaN": _with(torch.nan),
    "infinite": _with(torch.inf),
    "minus infinity": _with(-torch.inf),
    "negative zero": lambda *given: torch.full(given[0], -0.0, dtype=torch.float64),
    "probabilities": lambda *given: _random(*given).softmax(1),
    "whole numbers": lambda shape, sizes, generator: torch.randint(-4, 5, shape, generator=generator),
    "classes": lambda shape, sizes, generator: torch.randint(0, sizes["c"], shape, generator=generator),
    "sites": _sites,
}
"""Functions that make the values of a tensor, by name, from its shape, the sizes of all letters and a generator.

``ties`` are few different values, so that several elements are the largest. ``far`` has a mean that is much larger than
the standard deviation, which amplifies round-off. ``classes`` are labels of C classes, and ``sites`` the values of a
sparse tensor.
"""

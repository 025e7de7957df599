"""Draws single operators: geometry, options and shapes, awkward ones on purpose; one module per family.

::

    complex        Draws operators of complex numbers, and Fourier transforms
    derivatives    Draws second derivatives: the gradient of a penalty on gradients, through one layer
    elementwise    Draws operators that act element by element
    losses         Draws losses
    normalization  Draws normalizations and dropout
    programs       What drawn programs have in common: inputs, and a module or a function applied to one of them
    reductions     Draws reductions, extremes, and matrix products
    sampling       Draws operators that pick or blend positions: interpolation, padding, pixel shuffling
    shaping        Draws operators that join tensors, move elements, or pick some of them
    windows        Draws operators of windows: convolutions and poolings
"""

from __future__ import annotations

from collections.abc import Callable

from distconv.jobs.verification.differential.draw import Draw, Program
from distconv.jobs.verification.differential.operators import (
    complex,
    derivatives,
    elementwise,
    losses,
    normalization,
    reductions,
    sampling,
    shaping,
    windows,
)

OPERATORS: dict[Callable[[Draw], Program], float] = {
    windows.convolution: 12,
    windows.transposed_convolution: 5,
    windows.max_pool: 5,
    windows.average_pool: 5,
    windows.adaptive_pool: 3,
    windows.unpool: 1,
    normalization.batch_norm: 4,
    normalization.group_norm: 2,
    normalization.instance_norm: 1,
    normalization.layer_norm: 2,
    normalization.dropout: 1,
    normalization.softmax: 1,
    sampling.interpolation: 5,
    sampling.padding: 4,
    sampling.pixel_shuffle: 1,
    elementwise.unary: 2,
    elementwise.binary: 4,
    elementwise.in_place: 1,
    shaping.concatenation: 3,
    shaping.shaping: 4,
    reductions.reduction: 3,
    reductions.extreme: 2,
    reductions.linear: 2,
    reductions.product: 1,
    reductions.further: 1,
    losses.cross_entropy: 4,
    losses.binary_cross_entropy: 2,
    losses.other_loss: 2,
    complex.function: 1,
    complex.fourier: 1,
    derivatives.penalty: 3,
}
"""Operators and how often they are drawn."""


def draw(source: Draw) -> Program:
    """One operator with its input."""
    return source.weighted(list(OPERATORS), list(OPERATORS.values()))(source)

r"""Algorithm 1: the modified Blelloch scan, complete, truncated at a level, or (at level 0) linear.

The levels are kept one after another instead of in place: level d + 1 holds the products of pairs of level d, half as
many, and no operand is overwritten. ``A <> B`` is the map that applies A and then B. The paper works in place, in an
array a[0], ..., a[n]. Its up-sweep also computes a[n], which line 9 of the algorithm overwrites before it is read; this
product is left out here.

::

    level 0   gradient  J1   J2  J3   J4  J5 ...
                  \____/     \___/    \___/
    level 1       vector     J2<>J3   J4<>J5 ...      the front is a vector at every level
                        \_____/
    level 2              vector ...

Source: BPPSA, 3.2, algorithm 1, figures 3 and 4; 5.3 for the truncated variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .accounting import set_stage
from .elements import Affine, Level


def sweep_levels(n: int) -> tuple[int, int]:
    """Return the numbers of levels of the up-sweep and of the down-sweep over a chain of ``n`` Jacobians (Eq. 5).

    Figure 3 counts two levels more, the input and the identity of line 9: VGG-11's 21 layers have L0-L4 upwards and
    L5-L10 downwards.

    Examples
    --------
    >>> sweep_levels(21), sweep_levels(7)
    ((4, 5), (2, 3))
    """
    down = n.bit_length()
    return down - 1, down


def scan(gradient: torch.Tensor, level: Level, depth: int | None = None) -> Any:
    """Return the gradient after each element.

    Parameters
    ----------
    gradient : Tensor
        The gradient before the first element (B, N).
    level : Level
        The elements.
    depth : int, optional
        Number of levels of the up-sweep. Above them the scan is linear: with 0 it is fully linear. Default: all levels.

    Returns
    -------
    list of Tensor, or Tensor
        One vector for each element, in a list for a Chain and in one tensor (m, B, N) for a Stack.
    """
    below: list[tuple[Level, torch.Tensor]] = []
    front = gradient
    while len(level) and (depth is None or len(below) < depth):
        set_stage("up-sweep", len(below))
        # The first element goes into the front as a vector. Only the others are combined, two by two.
        front = level[0](front)
        below.append((level[1:], front))
        # Of an odd number the last element has no partner. The down-sweep applies it to a vector.
        level = level[1:].combine_pairs()
    set_stage("linear")
    vectors: Any = level.apply_in_order(front)
    for number, (rest, front) in reversed([*enumerate(below)]):
        set_stage("down-sweep", number)
        # From the vectors above, which are those before every second element, to those of this level.
        vectors = rest.down_sweep(front, vectors)
    return vectors


def gradients(gradient: torch.Tensor, level: Level, depth: int | None = None) -> Any:
    """Return the gradient after each element, as :func:`scan`, without the last element in products of matrices.

    As in the paper: no other element depends on the last one, so products of matrices with it would be wasted.

    Parameters
    ----------
    gradient, level, depth
        As in :func:`scan`.

    Returns
    -------
    list of Tensor, or Tensor
        As in :func:`scan`.
    """
    if not len(level):
        return level.apply_in_order(gradient)
    vectors: Any = scan(gradient, level[:-1], depth)
    # The last element is applied to a vector only: nothing after it reads a product with its matrix.
    set_stage("last")
    last: Any = level[-1:].apply_in_order(vectors[-1] if len(vectors) else gradient)
    return level.join([vectors, last])


@dataclass
class UpSweep:
    """Levels over elements without a gradient: the up-sweep that a rank computes before its gradient arrives."""

    levels: list[Level]

    @classmethod
    def build(cls, level: Level, depth: int | None = None) -> UpSweep:
        """Return the up-sweep over ``level``, of at most ``depth`` levels.

        Parameters
        ----------
        level : Level
            This rank's elements.
        depth : int, optional
            Maximum number of levels. Default: all.

        Returns
        -------
        UpSweep
        """
        levels = [level]
        while len(levels[-1]) > 1 and (depth is None or len(levels) <= depth):
            set_stage("up-sweep", len(levels) - 1)
            levels.append(levels[-1].combine_pairs())
        return cls(levels)

    def product(self) -> Affine:
        """Return the product of all elements."""
        set_stage("total")
        # The elements of the top level in order, then, from the top level to the lowest, the last element of each level
        # of odd length, which has no partner in the level above.
        top = self.levels[-1]
        product = top[0]
        for i in range(1, len(top)):
            product = top[i].compose_after(product)
        for level in reversed(self.levels[:-1]):
            if len(level) % 2:
                product = level[len(level) - 1].compose_after(product)
        return product

    def down_sweep(self, gradient: torch.Tensor) -> Any:
        """Return the gradient after each element: the down-sweep.

        Parameters
        ----------
        gradient : Tensor
            The gradient before the first element (B, N).

        Returns
        -------
        list of Tensor, or Tensor
            As in :func:`scan`.
        """
        set_stage("linear")
        vectors: Any = self.levels[-1].apply_in_order(gradient)
        for number, level in reversed([*enumerate(self.levels[:-1])]):
            set_stage("down-sweep", number)
            # Without the first vector, which is the gradient itself.
            vectors = level.down_sweep(gradient, vectors)[1:]
        return vectors

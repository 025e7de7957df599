"""What the normalizations share: moments that keep their digits, and the line that their gradient subtracts."""

from __future__ import annotations

from collections.abc import Callable

import torch

_BLOCK_ELEMENTS = 1 << 19
"""Elements of a temporary: about what a core's cache holds."""

_FAR = 10.0
"""Squared distance from the mean, in variances, beyond which sums are taken again: at most one digit is lost."""

Moments = tuple[torch.Tensor, torch.Tensor]
"""Mean and biased variance."""


def taken_near(about: Callable[[torch.Tensor], Moments], origin: torch.Tensor) -> Moments:
    """The moments from sums about ``origin``, or about their mean where that is far from it.

    Far from the mean the difference of squares has lost digits. All ranks see the same sums, so all take them again.
    """
    mean, var = about(origin)
    if bool(((mean - origin) ** 2 > _FAR * var).any()):
        mean, var = about(mean)
    return mean, var


def subtract_line(
    dx: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, slope: torch.Tensor, level: torch.Tensor
) -> None:
    """``dx -= slope (x - mean) + level``, some channels at a time: a whole x - mean would be one more activation.

    ``mean``, ``slope`` and ``level`` are (1, C, 1, ...), of as many dimensions as x (N, C, ...).
    """
    step = max(1, x.shape[1] * _BLOCK_ELEMENTS // max(1, x.numel()))
    for c in (slice(i, i + step) for i in range(0, x.shape[1], step)):
        dx[:, c].addcmul_(x[:, c] - mean[:, c], slope[:, c], value=-1).sub_(level[:, c])

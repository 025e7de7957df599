"""Keys of caches: consecutive calls of operators that differ in one option each equal one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal
from tests.layers.compare import same_as_one_process


def check_cache_keys(comm: Any, functions: Sequence[Callable[[Any], Any]]) -> None:
    """Call each function, and the first one again, on three layouts whose caches must not be mixed up."""
    grid = grid_over(comm, h=2)
    x = normal(2, 4, 7, 9)
    # The first two are equal, and differ in the name of an axis of one part.
    for axes, form in (("hw", torch.contiguous_format), ("h-", torch.contiguous_format), ("h-", torch.channels_last)):
        dist = dc.Distribution(grid, (None, None, *(axis if axis != "-" else None for axis in axes)))
        for function in (*functions, functions[0]):
            same_as_one_process(dist, function, x.contiguous(memory_format=form))

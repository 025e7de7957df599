"""Table 1: zeros, bytes and generation of the transposed Jacobians of VGG-11's first layers on a 32 x 32 image.

Source: BPPSA, table 1, 3.3 and 3.4.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from distconv.jobs.papers.printed_tables import Rows
from distconv.kernels.jacobian import (
    SparseJacobian,
    Windows,
    batched_conv2d,
    batched_max_pool2d,
    batched_relu,
)

PUBLISHED = {"convolution": (0.99157, 8.3e3), "ReLU": (0.99998, 1.2e6), "max-pooling": (0.99994, 1.5e5)}
"""Sparsity, and the speed-up over autograd (Table 1, measured on an AMD Threadripper 1950X)."""

REPEATS = 5
"""Runs of the generation with a known pattern, whose mean time is printed."""


def table(columns: int, size: int = 32, channels: int = 64) -> Rows:
    """Print a row for each operator.

    Parameters
    ----------
    columns : int
        Columns that autograd is timed on; its time is scaled to all columns.
    size : int
        Height and width of the input.
    channels : int
        Channels of the input.

    Returns
    -------
    list of dict
    """
    torch.manual_seed(0)
    image, weight = torch.randn(1, 3, size, size), torch.randn(channels, 3, 3, 3)
    maps = torch.randn(1, channels, size, size)
    _, indices = F.max_pool2d(maps, 2, return_indices=True)
    padded, pooled = Windows.build((size, size), 3, 1, 1, 1), Windows.build((size, size), 2, 2, 0, 1)
    print(f"Table 1, VGG-11 on {size}x{size}, float32, int64 indices; times with {torch.get_num_threads()} threads")
    print(f"{'operator':<12}{'rows x columns':>16}{'non-zeros':>11}{'sparsity':>10}{'paper':>9}", end="")
    print(f"{'dense MB':>10}{'values MB':>11}{'+ indices':>11}{'first ms':>10}{'again ms':>10}", end="")
    print(f"{'autograd s':>12}{'speed-up':>10}{'paper':>9}")
    return [
        _row(
            "convolution",
            lambda: batched_conv2d(weight, 3, padded),
            lambda x: F.conv2d(x, weight, None, 1, 1),
            image,
            columns,
        ),
        _row("ReLU", lambda: batched_relu(maps), F.relu, maps, columns),
        _row(
            "max-pooling",
            lambda: batched_max_pool2d(indices, pooled),
            lambda x: F.max_pool2d(x, 2),
            maps,
            columns,
        ),
    ]


def _row(
    name: str,
    generate: Callable[[], SparseJacobian],
    function: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    columns: int,
) -> dict[str, object]:
    # The first run also builds the pattern, which is cached. A training builds it once, so later runs count.
    first_s = _seconds(generate, 1)
    jacobian = generate()
    again_s = _seconds(generate, REPEATS)
    autograd_s = by_columns(function, x, columns)
    pattern, (sparsity, speed_up) = jacobian.pattern, PUBLISHED[name]
    rows, cols = pattern.shape
    row: dict[str, object] = {
        "operator": name,
        "rows": rows,
        "columns": cols,
        "nonzeros": pattern.nnz,
        "sparsity": pattern.sparsity,
        "dense_bytes": 4 * rows * cols,
        "value_bytes": jacobian.values.nbytes,
        "index_bytes": pattern.index_bytes,
        "first_s": first_s,
        "again_s": again_s,
        "autograd_s": autograd_s,
    }
    with_indices = jacobian.values.nbytes + pattern.index_bytes
    megabytes = [nbytes / 1e6 for nbytes in (4 * rows * cols, jacobian.values.nbytes, with_indices)]
    print(f"{name:<12}{f'{rows} x {cols}':>16}{pattern.nnz:>11}{pattern.sparsity:>10.5f}{sparsity:>9.5f}", end="")
    print(f"{megabytes[0]:>10.1f}{megabytes[1]:>11.2f}{megabytes[2]:>11.2f}{1e3 * first_s:>10.2f}", end="")
    print(f"{1e3 * again_s:>10.3f}{autograd_s:>12.1f}{autograd_s / again_s:>10.1e}{speed_up:>9.1e}")
    return row


def by_columns(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, columns: int) -> float:
    """Return the seconds to generate the full transposed Jacobian with autograd, one column (one output) at a time.

    Parameters
    ----------
    function : callable
    x : torch.Tensor
    columns : int
        Number of columns that are timed. They are evenly spaced, and their time is scaled to all columns.

    Returns
    -------
    float
    """
    x = x.clone().requires_grad_()
    y = function(x).flatten()
    chosen = torch.linspace(0, len(y) - 1, columns).long().tolist()
    unit = torch.zeros_like(y)

    def generate() -> None:
        for column in chosen:
            unit[column] = 1
            torch.autograd.grad(y, x, unit, retain_graph=True)
            unit[column] = 0

    return _seconds(generate, 1) / columns * len(y)


def _seconds(action: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - start) / repeats

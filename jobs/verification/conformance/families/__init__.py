"""The conformance table, one module per family of operators.

::

    calls          Other ways to call the same operators
    convolution    Convolutions and transposed convolutions, as functions and as modules
    dropout        Dropout: the mask is the one that torch draws in one process from the same seed
    elementwise    Operators that act element by element: of one tensor, of two that broadcast, and in place
    losses         Losses, of samples and of pixels, with all that changes what their mean divides by
    networks       Blocks of networks as users write them
    normalization  Normalization: batch, group, instance and layer norm, local response, and vectors to unit length
    numbers        Other numbers than float64 near one: other dtypes, NaN and infinity, other memory than rows
    optimizers     Steps of torch's optimizers, of gradient clipping
    ordering       Operators that look along a whole dimension
    pooling        Pooling: windows, adaptive and global, and its inverse
    products       Matrix products: linear layers, matmul and its kin, attention
    reductions     Reductions: sums, means, spreads, extremes and norms, over some dimensions or all
    sampling       Operators whose output picks or blends positions of the input
    shaping        Operators that only move elements, or pick some of them: shapes, slices, joins
    sparse         Sparse convolution, pooling and normalization against dense torch at the active sites
    spellings      Elementwise operators under every name that torch has for them
"""

from distconv.jobs.verification.conformance.case import Case
from distconv.jobs.verification.conformance.families import (
    calls,
    convolution,
    dropout,
    elementwise,
    losses,
    networks,
    normalization,
    numbers,
    optimizers,
    ordering,
    pooling,
    products,
    reductions,
    sampling,
    shaping,
    sparse,
    spellings,
)

TABLE: dict[str, tuple[Case, ...]] = {
    "convolution": convolution.CASES,
    "pooling": pooling.CASES,
    "normalization": normalization.CASES,
    "dropout": dropout.CASES,
    "elementwise": elementwise.CASES,
    "spellings": spellings.CASES,
    "shaping": shaping.CASES,
    "sampling": sampling.CASES,
    "reductions": reductions.CASES,
    "ordering": ordering.CASES,
    "products": products.CASES,
    "losses": losses.CASES,
    "networks": networks.CASES,
    "optimizers": optimizers.CASES,
    "sparse": sparse.CASES,
    "calls": calls.CASES,
    "numbers": numbers.CASES,
}
"""All cases, by family."""

"""The conformance table, one module per family: what torch's own samples do not vary.

::

    blocks         Blocks of networks as users write them
    calls          Other ways to call the same operators: autograd modes, autocast, modules, what draws numbers
    convolution    Convolutions and transposed convolutions, as functions and as modules
    dense_sites    What sparse layers compute, on volumes: torch's own dense operators
    networks       Blocks of networks, layers that are frozen or left out, losses and attention of users' own
    normalization  Batch, group, instance and layer norm over steps, in training and evaluation
    operands       Operands of all kinds: split otherwise, plain, broadcast, views changed in place
    optimizers     Steps of torch's optimizers, of gradient clipping
    sparse         Sparse convolution, pooling and normalization against dense torch at the active sites
    values         Other numbers than float64 near one: other dtypes, ties, NaN and infinity
    windows        Windows that cross the edges of blocks: pooling, interpolation, padding
"""

from distconv.jobs.verification.conformance.families import (
    calls,
    convolution,
    networks,
    normalization,
    operands,
    optimizers,
    sparse,
    values,
    windows,
)
from distconv.jobs.verification.conformance.table import ConformanceCase

TABLE: dict[str, tuple[ConformanceCase, ...]] = {
    "convolution": convolution.CASES,
    "windows": windows.CASES,
    "normalization": normalization.CASES,
    "operands": operands.CASES,
    "values": values.CASES,
    "calls": calls.CASES,
    "networks": networks.CASES,
    "optimizers": optimizers.CASES,
    "sparse": sparse.CASES,
}
"""All cases, by family."""

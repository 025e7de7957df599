"""The conformance table, one module per family: what torch's own samples do not vary.

::

    blocks         Blocks of networks as users write them
    calls          Other ways to call the same operators: autograd modes, autocast, modules, random operators
    convolution    Convolutions and transposed convolutions, as functions and as modules
    dense_sites    Dense reference of the sparse layers: torch's dense operators on volumes
    networks       Blocks of networks, frozen or unused layers, losses and attention written by users
    normalization  Batch, group, instance and layer norm over steps, in training and evaluation
    operands       Kinds of operands: other distributions, plain, broadcast, views changed in place
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

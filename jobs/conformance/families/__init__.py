"""The conformance table, one module per family of operators."""

from distconv.jobs.conformance.case import Case
from distconv.jobs.conformance.families import (
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
    "calls": calls.CASES,
    "numbers": numbers.CASES,
}
"""All cases, by family."""

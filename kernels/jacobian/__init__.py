"""Transposed Jacobians of layers, made analytically.

::

    csr      Sparse transposed Jacobians: one pattern for all samples of a batch, and values for each of them or for all
    product  The product of sparse Jacobians: which pairs of non-zeros meet is found once
"""

from .csr import Pattern, SparseJacobian

__all__ = ["Pattern", "SparseJacobian"]

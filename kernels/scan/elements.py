"""Elements of a scan: affine maps g -> J g + s.

J is dense, sparse or the symbolic identity, which takes no time; s is the gradient from outside of the chain, or None.
A level of elements is a sequence (:class:`Chain`) or one tensor (:class:`Stack`). :mod:`.algorithm` combines
elements without knowledge of their representation. ``A <> B`` is the map that applies A and then B. The module contains
no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import torch

from distconv.errors import ScanError
from distconv.kernels.jacobian.csr import SparseJacobian, count_products, multiply

from .accounting import record_products


@dataclass(frozen=True)
class Identity:
    """The transposed Jacobian of an operation that only changes the shape; symbolic: no product is computed."""


Matrix = torch.Tensor | SparseJacobian | Identity
"""Dense (B or 1, N_in, N_out), sparse, or the identity."""


@dataclass(frozen=True, eq=False)
class Affine:
    """Affine map g -> ``matrix`` g + ``shift`` (B, N_in). A shift of None is zero."""

    matrix: Matrix
    shift: torch.Tensor | None = None

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """Apply the map to a vector, (B, N_out) -> (B, N_in)."""
        product = matrix_vector(self.matrix, vector)
        return product if self.shift is None else product + self.shift

    def compose_after(self, first: Affine) -> Affine:
        """Return the map that applies ``first`` and then this one: the paper's first <> self."""
        matrix = matrix_matrix(self.matrix, first.matrix)
        # J2 (J1 g + s1) + s2: the shift of the first map goes through the second one.
        return Affine(matrix, self.shift if first.shift is None else self(first.shift))


def matrix_vector(matrix: Matrix, vector: torch.Tensor) -> torch.Tensor:
    """Return J g of each sample, and record the FLOP.

    Parameters
    ----------
    matrix : Matrix
        J (B or 1, N_in, N_out).
    vector : Tensor
        g (B, N_out).

    Returns
    -------
    Tensor
        Shape (B, N_in); ``vector`` itself for the identity.
    """
    if isinstance(matrix, Identity):
        return vector
    if isinstance(matrix, SparseJacobian):
        record_products("mv", 2 * matrix.pattern.nnz * len(vector))
        return matrix.apply(vector)
    record_products("mv", 2 * matrix.shape[1] * matrix.shape[2] * len(vector))
    if len(matrix) == 1:
        # One product for all samples.
        return vector @ matrix[0].t()
    return torch.bmm(matrix, vector[:, :, None])[:, :, 0]


def matrix_matrix(second: Matrix, first: Matrix) -> Matrix:
    """Return ``second`` times ``first`` of each sample, and record the FLOP.

    Parameters
    ----------
    second : Matrix
        Shape (B or 1, N, K).
    first : Matrix
        Shape (B or 1, K, M).

    Returns
    -------
    Matrix
        Shape (B or 1, N, M); sparse if both are sparse, the other matrix if one is the identity, otherwise dense.
    """
    if isinstance(first, Identity):
        return second
    if isinstance(second, Identity):
        return first
    # A factor of one sample is shared by all.
    batch = max(second.shape[0], first.shape[0])
    if isinstance(second, SparseJacobian) and isinstance(first, SparseJacobian):
        record_products("mm", 2 * batch * count_products(second.pattern, first.pattern))
        return multiply(second, first)
    if isinstance(second, SparseJacobian):
        assert isinstance(first, torch.Tensor)
        record_products("mm", 2 * batch * second.pattern.nnz * first.shape[2])
        return second.times_dense(first)
    if isinstance(first, SparseJacobian):
        record_products("mm", 2 * batch * first.pattern.nnz * second.shape[1])
        # (J1^T J2^T)^T, since a sparse matrix multiplies dense ones from the left only.
        return first.transposed.times_dense(second.transpose(1, 2)).transpose(1, 2)
    record_products("mm", 2 * batch * second.shape[1] * second.shape[2] * first.shape[2])
    return second @ first


class Chain:
    """A level of single elements, of any shapes; vectors are a list of (B, N)."""

    def __init__(self, elements: Sequence[Affine]) -> None:
        self.elements = list(elements)

    def __len__(self) -> int:
        return len(self.elements)

    @overload
    def __getitem__(self, index: int) -> Affine: ...
    @overload
    def __getitem__(self, index: slice) -> Chain: ...
    def __getitem__(self, index: int | slice) -> Affine | Chain:
        return Chain(self.elements[index]) if isinstance(index, slice) else self.elements[index]

    def combine_pairs(self) -> Chain:
        """Return the elements 0 <> 1, 2 <> 3, ...; of an odd number the last one is left out."""
        firsts, seconds = self.elements[::2], self.elements[1::2]
        return Chain([second.compose_after(first) for first, second in zip(firsts, seconds, strict=False)])

    def apply_in_order(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the vector after each element, computed one after another."""
        out = []
        for element in self.elements:
            vector = element(vector)
            out.append(vector)
        return out

    def down_sweep(self, vector: torch.Tensor, above: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the vector before the first element and after each element: a level of the down-sweep.

        Parameters
        ----------
        vector : Tensor
            The vector before the first element (B, N).
        above : sequence of Tensor
            The vector after each of the len(self) // 2 pairs.

        Returns
        -------
        list of Tensor
            len(self) + 1 vectors.
        """
        before = [vector, *above]
        out = [vector]
        # After an odd element the vector is known from the level above. After an even one it is computed.
        for i, element in enumerate(self.elements):
            out.append(above[i // 2] if i % 2 else element(before[i // 2]))
        return out

    def join(self, parts: Sequence[Sequence[torch.Tensor] | torch.Tensor]) -> list[torch.Tensor]:
        """Return one list of vectors from several."""
        return [vector for part in parts for vector in part]


class Stack:
    """A level of dense elements of one shape: (m, B or 1, N, N); vectors are one tensor (m, B, N)."""

    def __init__(self, matrices: torch.Tensor, shifts: torch.Tensor | None = None) -> None:
        self.matrices, self.shifts = matrices, shifts

    def __len__(self) -> int:
        return len(self.matrices)

    @overload
    def __getitem__(self, index: int) -> Affine: ...
    @overload
    def __getitem__(self, index: slice) -> Stack: ...
    def __getitem__(self, index: int | slice) -> Affine | Stack:
        shift = None if self.shifts is None else self.shifts[index]
        return (Stack if isinstance(index, slice) else Affine)(self.matrices[index], shift)

    def combine_pairs(self) -> Stack:
        """Return the elements 0 <> 1, 2 <> 3, ... in one product; of an odd number the last one is left out."""
        half = len(self) // 2
        # Of an odd number the last one has no partner.
        first, second = self[: 2 * half : 2], self[1::2]
        m = self.matrices
        record_products("mm", 2 * m.shape[1] * m.shape[2] ** 3, half)
        shifts = None if first.shifts is None else second._apply(first.shifts)
        return Stack(second.matrices @ first.matrices, shifts)

    def _apply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Apply each element to its own vector of (m, B, N)."""
        m, shared = self.matrices, self.matrices.shape[1] == 1
        record_products("mv", 2 * vectors.shape[1] * m.shape[2] ** 2, len(m))
        out = vectors @ m[:, 0].transpose(1, 2) if shared else (m @ vectors[..., None])[..., 0]
        # In place: the product is new memory.
        return out if self.shifts is None else out.add_(self.shifts)

    def apply_in_order(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the vector after each element, computed one after another, (m, B, N)."""
        out = vector.new_empty(len(self), *vector.shape)
        record_products("mv", 2 * len(vector) * vector.shape[1] ** 2, len(self))
        if self.matrices.shape[1] == 1:
            for i, (matrix, result) in enumerate(zip(self.matrices[:, 0].mT.unbind(), out.unbind(), strict=True)):
                # Each vector is written where it stays, and read from there in the next step.
                torch.mm(vector, matrix, out=result)
                vector = result if self.shifts is None else result.add_(self.shifts[i])
            return out
        column = vector[:, :, None]
        for i, (matrix, result) in enumerate(zip(self.matrices.unbind(), out[..., None].unbind(), strict=True)):
            torch.bmm(matrix, column, out=result)
            column = result if self.shifts is None else result.add_(self.shifts[i][:, :, None])
        return out

    def down_sweep(self, vector: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """Return the vector before the first element and after each element: a level of the down-sweep.

        Parameters
        ----------
        vector : Tensor
            The vector before the first element (B, N).
        above : Tensor
            The vector after each pair (m // 2, B, N).

        Returns
        -------
        Tensor
            Shape (m + 1, B, N).
        """
        out = vector.new_empty(len(self) + 1, *vector.shape)
        out[0] = vector
        out[2::2] = above
        # One call for all even elements, whose vectors before them are known.
        out[1::2] = self[::2]._apply(out[: len(self) : 2])
        return out

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor of vectors from several."""
        return torch.cat(list(parts))


Level = Chain | Stack


def make_level(jacobians: torch.Tensor | Sequence[Matrix], sources: Any) -> Level:
    """Return the elements of Jacobians and sources, as a Stack for one tensor and a Chain for a sequence.

    Parameters
    ----------
    jacobians, sources
        As in :func:`distconv.kernels.scan.backpropagate`.

    Returns
    -------
    Chain or Stack
        One element for each Jacobian.

    Raises
    ------
    ScanError
        If a Jacobian is not a matrix, or the number of sources differs from the number of Jacobians.
    """
    kinds = torch.Tensor if isinstance(jacobians, torch.Tensor) else (torch.Tensor, list, tuple)
    if not isinstance(jacobians, (torch.Tensor, list, tuple)) or not isinstance(sources, (type(None), kinds)):
        containers = f"{type(jacobians).__name__} with sources in a {type(sources).__name__}"
        raise ScanError(f"backpropagate: Jacobians in a {containers}; pass two tensors, or two lists")
    if isinstance(jacobians, torch.Tensor):
        return Stack(jacobians, cast(torch.Tensor | None, sources))
    if sources is not None and len(sources) != len(jacobians):
        raise ScanError(f"backpropagate: {len(sources)} sources, {len(jacobians)} Jacobians; pass None for no source")
    shifts = [None] * len(jacobians) if sources is None else sources
    return Chain([Affine(_check_matrix(j, i), s) for i, (j, s) in enumerate(zip(jacobians, shifts, strict=True))])


def _check_matrix(jacobian: Matrix, index: int) -> Matrix:
    if isinstance(jacobian, (SparseJacobian, Identity)):
        return jacobian
    if not isinstance(jacobian, torch.Tensor) or jacobian.dim() not in (2, 3):
        shape = tuple(jacobian.shape) if isinstance(jacobian, torch.Tensor) else type(jacobian).__name__
        raise ScanError(
            f"backpropagate: jacobians[{index}] (={shape}) is not a matrix. Pass (N_in, N_out), (B, N_in, N_out), "
            "torch CSR, a SparseJacobian or Identity()"
        )
    if jacobian.layout == torch.sparse_csr and jacobian.dim() == 2:
        return SparseJacobian.from_torch(jacobian)
    if jacobian.layout != torch.strided:
        raise ScanError(f"backpropagate: jacobians[{index}] has layout {jacobian.layout}. Pass dense or one CSR matrix")
    return jacobian if jacobian.dim() == 3 else jacobian[None]

"""A scan over ranks: each rank keeps its own Jacobians.

1. Each rank reduces its own elements to their product (up-sweep). The first rank has the gradient, and its result is a
   vector.
2. Algorithm 1 runs over the ranks, one for each element of its array, with log2 p exchanges up and as many down. Each
   rank then has the gradient before its own elements.
3. Each other rank computes the gradients after its own elements (down-sweep).

Ranks without Jacobians take no part, apart from the first one. :mod:`.backpropagation` calls this module.

Source: BPPSA, 3.2, algorithm 1, with a rank in the place of a worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from distconv.communication.transport import Exchange
from distconv.kernels.jacobian.csr import Pattern, SparseJacobian

from .accounting import set_stage
from .algorithm import UpSweep, gradients
from .checks import Problem
from .elements import Affine, Identity, Level, Matrix

WHAT = "backpropagation as a scan"


@dataclass(frozen=True)
class ScanRank:
    """The position of this rank in the array of the active ranks, and its messages."""

    comm: Any
    """Communicator of all ranks, also of those that are not active."""
    problem: Problem
    like: torch.Tensor
    """Empty tensor with the dtype and the device of all messages."""

    @property
    def active(self) -> list[int]:
        """The active ranks in the order of the array."""
        return self.problem.active

    @property
    def index(self) -> int:
        """Position of this rank in the array."""
        return self.active.index(self.comm.rank)

    def receive_vector(self, source: int, after: int) -> torch.Tensor:
        """Receive a gradient.

        Parameters
        ----------
        source : int
            Position of the rank that sends it.
        after : int
            Position of the rank after whose Jacobians it is the gradient, which determines its width.

        Returns
        -------
        Tensor
            Shape (B, N).
        """
        vector = self.like.new_empty(self.problem.gradient[0], self.problem.widths[self.active[after]])
        self._receive(source, [vector])
        return vector

    def send_vector(self, target: int, vector: torch.Tensor) -> None:
        """Send a vector to the rank at position ``target``.

        Parameters
        ----------
        target : int
            Position of the rank in the array.
        vector : Tensor
            A gradient (B, N).
        """
        self._send(target, [vector.contiguous()])

    def send_map(self, target: int, element: Affine) -> None:
        """Send an element to the rank at position ``target``: a header, then its indices, values and shift, if any.

        Parameters
        ----------
        target : int
            Position of the rank in the array.
        element : Affine
            The element.
        """
        tensors = _tensors(element)
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0] = _KINDS.index(type(element.matrix))
        header[1] = element.shift is not None
        matrix = element.matrix
        if not isinstance(matrix, Identity):
            nonzeros = matrix.pattern.nnz if isinstance(matrix, SparseJacobian) else 0
            header[2:] = torch.tensor([*matrix.shape, nonzeros])
        # The receiver learns from the header which tensors follow. It is on the device of the tensors, which selects
        # the path.
        self._send(target, [header.to(self.like.device), *tensors])

    def receive_map(self, source: int) -> Affine:
        """Receive the element that :meth:`send_map` of the rank at position ``source`` has sent."""
        header = self.like.new_empty(_HEADER, dtype=torch.int64)
        self._receive(source, [header])
        kind, shifted, batch, rows, cols, nnz = header.tolist()
        like = self.like
        matrix: Matrix = Identity()
        tensors: list[torch.Tensor] = []
        if _KINDS[kind] is torch.Tensor:
            matrix = like.new_empty(batch, rows, cols)
            tensors.append(matrix)
        elif _KINDS[kind] is SparseJacobian:
            crow, col = (like.new_empty(size, dtype=torch.int64) for size in (rows + 1, nnz))
            matrix = SparseJacobian(Pattern(crow, col, (rows, cols)), like.new_empty(batch, nnz))
            tensors += [crow, col, matrix.values]
        shift = like.new_empty(self.problem.gradient[0], rows) if shifted else None
        self._receive(source, tensors if shift is None else [*tensors, shift])
        return Affine(matrix, shift)

    def _send(self, target: int, tensors: list[torch.Tensor]) -> None:
        peer = self.active[target]
        Exchange(self.comm, [(peer, tensor) for tensor in tensors], [], WHAT).wait()

    def _receive(self, source: int, tensors: list[torch.Tensor]) -> None:
        peer = self.active[source]
        Exchange(self.comm, [], [(peer, tensor) for tensor in tensors], WHAT).wait()


_KINDS = [torch.Tensor, SparseJacobian, Identity]
"""Types of matrices, by their number in the header of a message."""
_HEADER = 6
"""Integers of a header: type, 1 if there is a shift, samples, rows, columns and non-zeros."""


def _tensors(element: Affine) -> list[torch.Tensor]:
    matrix, tensors = element.matrix, []
    if isinstance(matrix, SparseJacobian):
        tensors = [matrix.pattern.crow, matrix.pattern.col, matrix.values.contiguous()]
    elif isinstance(matrix, torch.Tensor):
        tensors = [matrix.contiguous()]
    return tensors if element.shift is None else [*tensors, element.shift.contiguous()]


def linear_over_ranks(gradient: torch.Tensor | None, level: Level, scan_rank: ScanRank) -> Any:
    """Return the gradient after each of this rank's elements. The ranks compute one after another.

    Collective: call on every active rank.

    Parameters
    ----------
    gradient : Tensor or None
        The gradient before the first element (B, N), on the first rank. Other ranks ignore it.
    level : Level
        This rank's elements.
    scan_rank : ScanRank
        This rank's position and messages.

    Returns
    -------
    list of Tensor, or Tensor
        As in :func:`distconv.kernels.scan.algorithm.scan`.
    """
    index = scan_rank.index
    vector = scan_rank.receive_vector(index - 1, index - 1) if index else gradient
    assert vector is not None
    vectors = gradients(vector, level, 0)
    if index < len(scan_rank.active) - 1:
        # A rank without Jacobians passes the gradient on.
        scan_rank.send_vector(index + 1, vectors[-1] if len(level) else vector)
    return vectors


def scan_over_ranks(gradient: torch.Tensor | None, level: Level, depth: int | None, scan_rank: ScanRank) -> Any:
    """Return the gradient after each of this rank's elements, by Algorithm 1 over the ranks.

    Collective: call on every active rank.

    Parameters
    ----------
    gradient, level, scan_rank
        As in :func:`linear_over_ranks`.
    depth : int or None
        Number of levels of each rank's own up-sweep; None for all.

    Returns
    -------
    list of Tensor, or Tensor
        As in :func:`distconv.kernels.scan.algorithm.scan`.
    """
    if scan_rank.index:
        tree = UpSweep.build(level, depth)
        last = scan_rank.index == len(scan_rank.active) - 1
        # The last rank sends no element, so it does not compute its product.
        return tree.down_sweep(_exchange(Affine(Identity()) if last else tree.product(), scan_rank))
    assert gradient is not None
    vectors = gradients(gradient, level, depth)
    _exchange(vectors[-1] if len(level) else gradient, scan_rank)
    return vectors


def _exchange(element: Any, scan_rank: ScanRank) -> Any:
    """Return the gradient before this rank's element, by Algorithm 1; None on the first rank, which has it already."""
    last, index = len(scan_rank.active) - 1, scan_rank.index
    # Rank i of the array has element i: the gradient is with the first.
    levels = last.bit_length()
    # By level: the element to the left, which the down-sweep applies.
    kept: dict[int, Any] = {}
    for d in range(levels):
        set_stage("up-sweep over ranks", d)
        for left, right in _exchanging_ranks(d, last):
            is_vector = left == (1 << d) - 1  # the first element of a level contains the gradient
            if index == left and isinstance(element, torch.Tensor):
                scan_rank.send_vector(right, element)
            elif index == left:
                scan_rank.send_map(right, element)
            elif index == right:
                kept[d] = received = scan_rank.receive_vector(left, left) if is_vector else scan_rank.receive_map(left)
                # The last rank's element would become the product of all elements, a[n], which no rank reads.
                if right < last:
                    element = (
                        element(received) if isinstance(received, torch.Tensor) else element.compose_after(received)
                    )
    before: Any = None
    for d in reversed(range(levels)):
        set_stage("down-sweep over ranks", d)
        for left, right in _exchanging_ranks(d, last):
            if left == (1 << d) - 1:  # the right rank would send the identity
                before = kept[d] if index == right else before
            elif index == left:
                before = scan_rank.receive_vector(right, left - (1 << d))
            elif index == right:
                scan_rank.send_vector(left, before)
                # The vector before the right element is the one before the left element, after the left element.
                before = kept[d](before)
    return before


def _exchanging_ranks(d: int, last: int) -> list[tuple[int, int]]:
    """Return the pairs (l, r) of positions that exchange elements at level ``d`` (Algorithm 1, lines 5 and 12).

    Examples
    --------
    >>> _exchanging_ranks(0, 4), _exchanging_ranks(1, 4), _exchanging_ranks(2, 4)
    ([(0, 1), (2, 3)], [(1, 3)], [(3, 4)])
    """
    return [(left, min(left + (1 << d), last)) for left in range((1 << d) - 1, last, 2 << d)]

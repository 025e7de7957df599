"""Kernel maps: pairs of an input site and an output site for each offset of a kernel.

Source: Zhai et al., "SparsePipe: parallel deep learning for 3D point clouds", eq. 3 and step 2 below it; there by
hashing, here by a table or a binary search in sorted keys, with the same code on a CPU and a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from .coordinates import KeySpace, Offsets, stride_per_dim

Pairs = tuple[torch.Tensor, torch.Tensor]
"""Rows of the input sites and of the output sites of pairs, int64 (P,) each; no row occurs twice in either."""


TABLE_CELLS = 32
"""Cells for each site up to which a table of all cells is faster than a search (by 3 times for 20,000 sites)."""

GROUP_PAIRS = 1 << 18
"""Largest number of pairs of a group of offsets, whose products are in memory at once."""


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive offsets of a kernel, whose pairs are added up together."""

    offsets: range
    sizes: list[int]
    """Number of pairs of each offset."""
    order: torch.Tensor
    """Shape (P,). Sorts the pairs of all offsets by output site, and those of one site by offset."""
    ends: torch.Tensor
    """Shape (N_out + 1,). The pairs of site o are at ``ends[o] : ends[o + 1]`` of ``order``."""

    def sum_pairs(self, rows: torch.Tensor, of_pairs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sums over the pairs of each output site.

        The result is deterministic: each site is added up by one thread in a fixed order, without atomics on a GPU.

        Parameters
        ----------
        rows : Tensor
            Values, (P, C) without ``of_pairs``.
        of_pairs : Tensor, optional
            The row of each pair (P,). By default pair i has row i.

        Returns
        -------
        Tensor
            Shape (N_out, C).
        """
        chosen = self.order if of_pairs is None else of_pairs[self.order]
        return F.embedding_bag(chosen, rows, self.ends, mode="sum", include_last_offset=True)


@dataclass(frozen=True, eq=False)
class KernelMap:
    """The pairs of input and output sites for each offset of a kernel.

    A site occurs at most once for each offset, so sums over the offsets are deterministic. One map serves a
    convolution, both of its gradients and, transposed, the transposed convolution.
    """

    pairs: tuple[Pairs, ...]
    """Pairs of each offset."""
    in_sites: int
    """Number of input sites."""
    out_sites: int
    """Number of output sites."""
    identity: int | None = None
    """Index of the zero offset, whose pairs are all (i, i); None if there is no such offset."""

    def transposed(self) -> KernelMap:
        """Return the map from output to input sites, which shares the memory of this one."""
        return self._transposed

    @cached_property
    def _transposed(self) -> KernelMap:
        swapped = tuple((outputs, inputs) for inputs, outputs in self.pairs)
        return KernelMap(swapped, self.out_sites, self.in_sites, self.identity)

    @cached_property
    def is_symmetric(self) -> bool:
        """True if the transposed map has the pairs of this one, with the offsets in reverse order."""
        return self.identity is not None and all(
            # By identity, which costs nothing: kernel_map() makes opposite offsets of the same tensors.
            (here[0] is there[1] and here[1] is there[0]) or k == self.identity
            for k, (here, there) in enumerate(zip(self.pairs, reversed(self.pairs), strict=True))
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of all offsets that have pairs."""
        groups: list[Group] = []
        first, size = 0, 0
        for k, (_, outputs) in enumerate(self.pairs):
            if size and size + len(outputs) > GROUP_PAIRS:
                groups.append(self._group(range(first, k)))
                first, size = k, 0
            size += len(outputs)
        if size:
            groups.append(self._group(range(first, len(self.pairs))))
        return tuple(groups)

    def _group(self, offsets: range) -> Group:
        sites = [self.pairs[k][1] for k in offsets]
        joined = torch.cat(sites).int()  # sorts faster than int64
        counts = torch.bincount(joined, minlength=self.out_sites)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        # Stable: the pairs of a site stay in the order of the offsets, in which they are added.
        return Group(offsets, [len(each) for each in sites], joined.argsort(stable=True), ends)

    @property
    def active_pairs(self) -> int:
        """Number of pairs. Multiplied by 2 x input x output channels, the FLOP of a convolution."""
        return sum(len(inputs) for inputs, _ in self.pairs)

    @property
    def bytes(self) -> int:
        """Memory in bytes of the pairs, counted once if they serve two offsets, and of the groups that exist."""
        distinct = {id(rows): rows for pair in self.pairs for rows in pair}
        back = self.__dict__.get("_transposed")
        groups: list[Group] = [group for each in (self, back) if each for group in each.__dict__.get("groups", ())]
        return sum(rows.nbytes for rows in distinct.values()) + sum(g.order.nbytes + g.ends.nbytes for g in groups)


def box_offsets(kernel_size: Sequence[int], padding: Sequence[int], dilation: Sequence[int] | None = None) -> Offsets:
    """Return the offsets of a box: d i - p for i = 0 to k - 1 along each dimension, the last dimension fastest.

    Parameters
    ----------
    kernel_size, padding : sequence of int
        k and p of each dimension.
    dilation : sequence of int, optional
        d of each dimension (default: ones).

    Returns
    -------
    Offsets
        One tuple of D numbers for each cell of the kernel.

    Examples
    --------
    >>> box_offsets((3, 2), (1, 0))
    ((-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0), (1, 1))
    """
    along = zip(kernel_size, padding, dilation or (1,) * len(kernel_size), strict=True)
    return tuple(itertools.product(*(range(-p, d * k - p, d) for k, p, d in along)))


def kernel_map(
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    offsets: Offsets,
    unit: int | Sequence[int] = 1,
    order: torch.Tensor | None = None,
) -> KernelMap:
    """Return the map of all pairs with input = output + offset x unit.

    Parameters
    ----------
    inputs, outputs : Tensor
        Coordinates (N, 1 + D) of the sites, all rows distinct. If both are the same tensor object, the map is that of a
        submanifold, and opposite offsets share their pairs.
    offsets : Offsets
        The offsets of the kernel.
    unit : int or sequence of int
        Number of cells of a step: one number, or one for each dimension.
    order : Tensor, optional
        The order (N,) that sorts ``inputs``. By default they are sorted.

    Returns
    -------
    KernelMap
        The map.
    """
    # With this margin a step never leaves the box, where its key would be that of another row.
    units = stride_per_dim(unit, inputs.shape[1] - 1)
    reach = [step * max((abs(o[d]) for o in offsets), default=0) for d, step in enumerate(units)]
    space = KeySpace.enclose(inputs, outputs, margin=reach)
    keys = space.pack(inputs if order is None else inputs[order])
    queries = keys if order is None and outputs is inputs else space.pack(outputs)
    rows_of = _lookup(keys, order, math.prod(space.extents))
    pairs: dict[tuple[int, ...], Pairs] = {}
    for offset in offsets:
        # If input and output sites are the same, pairs at the opposite offset are these pairs, swapped.
        opposite = pairs.get(tuple(-o for o in offset)) if outputs is inputs else None
        if opposite is not None:
            pairs[offset] = (opposite[1], opposite[0])
        else:
            rows = rows_of(queries + space.step([o * step for o, step in zip(offset, units, strict=True)]))
            present = (rows >= 0).nonzero()[:, 0]
            pairs[offset] = rows[present], present
    centre = (0,) * (inputs.shape[1] - 1)
    identity = offsets.index(centre) if outputs is inputs and centre in offsets else None
    return KernelMap(tuple(pairs[offset] for offset in offsets), len(inputs), len(outputs), identity)


def _lookup(keys: torch.Tensor, order: torch.Tensor | None, cells: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from keys (M,) in 0 .. ``cells`` - 1 to the rows of their sites, -1 where there is none.

    ``keys`` (N,) are those of the sites, sorted by ``order``. It uses a table of all cells if the sites are dense
    enough, otherwise a binary search.
    """
    rows = torch.arange(len(keys), device=keys.device) if order is None else order
    if cells <= TABLE_CELLS * len(keys):
        table = keys.new_full((cells,), -1)
        table[keys] = rows
        return table.__getitem__

    def search(queries: torch.Tensor) -> torch.Tensor:
        if not len(keys):
            return torch.full_like(queries, -1)
        # A query above all keys would be one after the last.
        positions = torch.searchsorted(keys, queries).clamp_(max=len(keys) - 1)
        return rows[positions].where(keys[positions] == queries, -1)

    return search

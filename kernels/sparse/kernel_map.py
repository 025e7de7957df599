"""Kernel maps: which input site meets which output site at each offset of a kernel.

Source: Zhai et al., "SparsePipe: parallel deep learning for 3D point clouds", eq. 3 and step 2 below it; there by
hashing, here by a table or a binary search among sorted keys, which are the same code on a CPU and a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from .coordinates import KeySpace, Offsets

Pairs = tuple[torch.Tensor, torch.Tensor]
"""Rows of input sites and of the output sites that they meet, int64 (P,) each; no row occurs twice in either."""


TABLE_CELLS = 32
"""For each site, up to which a table of all cells of the space is faster than a search (of 20,000 sites, 3 times)."""

GROUP_PAIRS = 1 << 18
"""Offsets are worked on together up to so many pairs: their products are held in memory at once."""


@dataclass(frozen=True, eq=False)
class Group:
    """Consecutive ``offsets`` of a kernel, and how what comes of their pairs, one after the other, is added up.

    ``order`` (P,) sorts the pairs by output site, those of one site by offset; those of site o are at
    ``ends[o] : ends[o + 1]`` of it.
    """

    offsets: range
    sizes: list[int]
    order: torch.Tensor
    ends: torch.Tensor

    def summed(self, rows: torch.Tensor, of_pairs: torch.Tensor | None = None) -> torch.Tensor:
        """Sums over the pairs of each output site, (N_out, C); ``of_pairs`` (P,): the row of each pair, else its own.

        Sites are shared out among threads, and each is added up in one order: no atomic additions on a GPU.
        """
        chosen = self.order if of_pairs is None else of_pairs[self.order]
        return F.embedding_bag(chosen, rows, self.ends, mode="sum", include_last_offset=True)


@dataclass(frozen=True, eq=False)
class KernelMap:
    """The ``pairs`` of input and output sites for each offset of a kernel.

    ``identity`` is the offset at which each site meets itself, if there is one; its pairs are all (i, i). A site occurs
    at most once per offset, so that what is added up offset by offset always comes out the same. The map serves the
    convolution, both of its gradients and, transposed, the transposed convolution.
    """

    pairs: tuple[Pairs, ...]
    in_sites: int
    out_sites: int
    identity: int | None = None

    def transposed(self) -> KernelMap:
        """The map from output to input sites; it shares the memory of this one."""
        return self._transposed

    @cached_property
    def _transposed(self) -> KernelMap:
        swapped = tuple((outputs, inputs) for inputs, outputs in self.pairs)
        return KernelMap(swapped, self.out_sites, self.in_sites, self.identity)

    @cached_property
    def is_mirrored(self) -> bool:
        """Whether the transposed map has the pairs of this one, with the offsets backwards."""
        return self.identity is not None and all(
            (here[0] is there[1] and here[1] is there[0]) or k == self.identity
            for k, (here, there) in enumerate(zip(self.pairs, reversed(self.pairs), strict=True))
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """All offsets that have pairs."""
        return tuple(self._grouped())

    def _grouped(self) -> Iterator[Group]:
        first, size = 0, 0
        for k, (_, outputs) in enumerate(self.pairs):
            if size and size + len(outputs) > GROUP_PAIRS:
                yield self._group(range(first, k))
                first, size = k, 0
            size += len(outputs)
        if size:
            yield self._group(range(first, len(self.pairs)))

    def _group(self, offsets: range) -> Group:
        sites = [self.pairs[k][1] for k in offsets]
        joined = torch.cat(sites).int()  # sorts faster than int64
        counts = torch.bincount(joined, minlength=self.out_sites)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return Group(offsets, [len(each) for each in sites], joined.argsort(stable=True), ends)

    @property
    def active_pairs(self) -> int:
        """The number of pairs: multiplied by 2 x input x output channels, the FLOPs of a convolution."""
        return sum(len(inputs) for inputs, _ in self.pairs)

    @property
    def bytes(self) -> int:
        """Memory of the pairs, those that serve two offsets once, and of the groups that have been asked for."""
        distinct = {id(rows): rows for pair in self.pairs for rows in pair}
        back = self.__dict__.get("_transposed")
        groups: list[Group] = [group for each in (self, back) if each for group in each.__dict__.get("groups", ())]
        return sum(rows.nbytes for rows in distinct.values()) + sum(g.order.nbytes + g.ends.nbytes for g in groups)


def box_offsets(kernel_size: Sequence[int], padding: Sequence[int]) -> Offsets:
    """The offsets of a box, last dimension fastest: -p to k - 1 - p along each dimension.

    >>> box_offsets((3, 2), (1, 0))
    ((-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0), (1, 1))
    """
    return tuple(itertools.product(*(range(-p, k - p) for k, p in zip(kernel_size, padding, strict=True))))


def kernel_map(
    inputs: torch.Tensor, outputs: torch.Tensor, offsets: Offsets, unit: int = 1, order: torch.Tensor | None = None
) -> KernelMap:
    """The map of all pairs with input = output + offset x ``unit``; coordinates (N, 1 + D), rows distinct.

    ``order`` sorts the rows of ``inputs`` (None: they are sorted). With ``outputs`` the very same tensor as ``inputs``
    the map is that of a submanifold, and mirrored offsets share their pairs.
    """
    reach = [unit * max((abs(o[d]) for o in offsets), default=0) for d in range(inputs.shape[1] - 1)]
    space = KeySpace.enclose(inputs, outputs, margin=reach)
    keys = space.pack(inputs if order is None else inputs[order])
    queries = keys if order is None and outputs is inputs else space.pack(outputs)
    rows_of = _lookup(keys, order, math.prod(space.extents))
    pairs: dict[tuple[int, ...], Pairs] = {}
    for offset in offsets:
        mirror = pairs.get(tuple(-o for o in offset)) if outputs is inputs else None
        if mirror is not None:
            pairs[offset] = (mirror[1], mirror[0])
        else:
            pairs[offset] = _matches(rows_of(queries + unit * space.step(offset)))
    centre = (0,) * (inputs.shape[1] - 1)
    identity = offsets.index(centre) if outputs is inputs and centre in offsets else None
    return KernelMap(tuple(pairs[offset] for offset in offsets), len(inputs), len(outputs), identity)


def _lookup(keys: torch.Tensor, order: torch.Tensor | None, cells: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives the rows of queries (M,) in 0 .. ``cells`` - 1, -1 where no site is; ``order`` sorted ``keys`` (N,).

    By a table of all cells where sites are not too few among them, else by binary search.
    """
    rows = torch.arange(len(keys), device=keys.device) if order is None else order
    if cells <= TABLE_CELLS * len(keys):
        table = keys.new_full((cells,), -1)
        table[keys] = rows
        return table.__getitem__

    def search(queries: torch.Tensor) -> torch.Tensor:
        if not len(keys):
            return torch.full_like(queries, -1)
        places = torch.searchsorted(keys, queries).clamp_(max=len(keys) - 1)
        return rows[places].where(keys[places] == queries, -1)

    return search


def _matches(rows: torch.Tensor) -> Pairs:
    """The rows of those that were found, and which these are."""
    present = (rows >= 0).nonzero()[:, 0]
    return rows[present], present

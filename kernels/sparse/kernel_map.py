"""Kernel maps: which input site meets which output site at each offset of a kernel.

Source: Zhai et al., "SparsePipe: parallel deep learning for 3D point clouds", eq. 3 and step 2 below it; there by
hashing, here by binary search among sorted keys, which is the same code on a CPU and a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .coordinates import KeySpace, Offsets

Pairs = tuple[torch.Tensor, torch.Tensor]
"""Rows of input sites and of the output sites that they meet, int64 (P,) each; no row occurs twice in either."""


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
        swapped = tuple((outputs, inputs) for inputs, outputs in self.pairs)
        return KernelMap(swapped, self.out_sites, self.in_sites, self.identity)

    @property
    def active_pairs(self) -> int:
        """The number of pairs: multiplied by 2 x input x output channels, the FLOPs of a convolution."""
        return sum(len(inputs) for inputs, _ in self.pairs)

    @property
    def bytes(self) -> int:
        """Memory of the pairs; of tensors that serve two offsets, once."""
        distinct = {id(rows): rows for pair in self.pairs for rows in pair}
        return sum(rows.nbytes for rows in distinct.values())


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
    space = KeySpace.of(inputs, outputs, margin=reach)
    keys = space.pack(inputs if order is None else inputs[order])
    queries = keys if order is None and outputs is inputs else space.pack(outputs)
    found: dict[tuple[int, ...], Pairs] = {}
    for offset in offsets:
        mirror = found.get(tuple(-o for o in offset)) if outputs is inputs else None
        if mirror is not None:
            found[offset] = (mirror[1], mirror[0])
        else:
            found[offset] = _matches(keys, queries + unit * space.step(offset), order)
    centre = (0,) * (inputs.shape[1] - 1)
    identity = offsets.index(centre) if outputs is inputs and centre in offsets else None
    return KernelMap(tuple(found[offset] for offset in offsets), len(inputs), len(outputs), identity)


def _matches(keys: torch.Tensor, queries: torch.Tensor, order: torch.Tensor | None) -> Pairs:
    """Where ``queries`` (M,) stand among the sorted ``keys`` (N,), and which of them do."""
    if not len(keys):
        return keys.new_empty(0), keys.new_empty(0)
    places = torch.searchsorted(keys, queries).clamp_(max=len(keys) - 1)
    outputs = (keys[places] == queries).nonzero()[:, 0]
    places = places[outputs]
    return places if order is None else order[places], outputs

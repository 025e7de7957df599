"""Seconds of communication of products of distributed matrices: layers whose channels are split."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distconv.perfmodel.machine.collectives import SUM_PASSES, messages
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Machine

_COPY_PASSES = 2


@dataclass(frozen=True)
class GemmTime:
    """Seconds of communication of a layer whose channels are split, forward (x, y) and backward (dL/dy, dL/dx)."""

    gather_x: float
    sum_y: float
    gather_dy: float
    sum_dx: float


def distributed_gemm(machine: Machine, group: RankGroup, blocks: int, x_bytes: float, y_bytes: float) -> GemmTime:
    """Communication of y = x W^T with x and y split over their features (channels) among ``group``, and W in place.

    ``x_bytes`` and ``y_bytes`` are the blocks that a rank owns; the channels of x are in ``blocks`` blocks. As
    the layers run it: index i gathers the features of x that its weights meet, and sends its shares of y to their
    owners; backward gathers dL/dy and sums shares of dL/dx, and dL/dW needs nothing more. One block of x is
    gather-x, p blocks are reduce-y, what lies between is two-dimensional. All are direct messages of a block. As
    features are not contiguous, messages are packed and unpacked, which counts.

    Source: Schatz, van de Geijn, Poulson 2016, the algorithms whose second operand is stationary; Dryden et al. 2019,
    II-B, III-D and V-B.
    """
    levels, parts = machine.levels(group), group.ranks
    roofline = machine.computing(levels.node.ranks).roofline
    # In the two-dimensional splits some index owns nothing of what it needs of x; all own a part of the y they compute.
    x_peers = {1: parts - 1, parts: 0}.get(blocks, parts // blocks)
    y_peers = blocks - 1

    def moved(peers: int, nbytes: float, passes: int) -> float:
        """Packed (read and written), sent, and brought to its place with the own part in ``passes`` over memory."""
        packing, placing = 2.0 * peers * nbytes, float(passes * (peers + 1) * nbytes)
        local = roofline.time(0.0, packing, math.inf) + roofline.time(0.0, placing, math.inf) if peers else 0.0
        return messages(levels, peers, nbytes) + local

    return GemmTime(
        moved(x_peers, x_bytes, _COPY_PASSES),
        moved(y_peers, y_bytes, SUM_PASSES),
        moved(y_peers, y_bytes, _COPY_PASSES),
        moved(x_peers, x_bytes, SUM_PASSES),
    )

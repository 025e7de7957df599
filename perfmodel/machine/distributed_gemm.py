"""Time of communication of products of distributed matrices: layers whose channels are split.

:mod:`distconv.perfmodel.cost.operation_cost` calls it for convolutions and linear layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distconv.perfmodel.machine.collectives import SUM_PASSES, messages_time
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Machine

_COPY_PASSES = 2


@dataclass(frozen=True)
class GemmTime:
    """Seconds of communication of a layer whose channels are split.

    Attributes
    ----------
    gather_x : float
        Forward: gather the channels of x.
    sum_y : float
        Forward: reduce-scatter the partial sums of y.
    gather_dy : float
        Backward: gather dL/dy.
    sum_dx : float
        Backward: reduce-scatter the partial sums of dL/dx.
    """

    gather_x: float
    sum_y: float
    gather_dy: float
    sum_dx: float


def distributed_gemm(machine: Machine, group: RankGroup, blocks: int, x_bytes: float, y_bytes: float) -> GemmTime:
    """Return the time of communication of y = x W^T with the channels of x and y split. W is not communicated.

    Each rank gathers the channels of x that its block of W multiplies, and sends its partial sums of y to their owners.
    Backward gathers dL/dy and reduce-scatters dL/dx; dL/dW needs no communication. With one block, each rank gathers
    all of x and sums nothing of y; p blocks mean the opposite; any number between is a two-dimensional split. All
    messages are direct messages of one block. Channels are not contiguous, so the time includes packing and unpacking.

    Source: Schatz, van de Geijn, Poulson 2016, the algorithms whose second operand is stationary; Dryden et al. 2019,
    II-B, III-D and V-B.

    Parameters
    ----------
    machine : Machine
    group : RankGroup
        Ranks over which the channels are split.
    blocks : int
        Blocks of the channels of x, 1 to ``group.ranks``.
    x_bytes, y_bytes : float
        Bytes of the block that a rank owns.

    Returns
    -------
    GemmTime
        Seconds, without ``Roofline.exchange_s``.
    """
    levels, parts = machine.levels(group), group.ranks
    roofline = machine.computing(levels.node.ranks).roofline
    # In two-dimensional splits some rank owns none of the x that it needs, while all own a block of the y they compute.
    # One block: all others send. p blocks: none. Otherwise the ranks that own the block of x.
    x_peers = {1: parts - 1, parts: 0}.get(blocks, parts // blocks)
    y_peers = blocks - 1

    def moved(peers: int, nbytes: float, passes: int) -> float:
        """Return the time to pack (read and write), send, and unpack blocks in ``passes`` over memory."""
        packing, placing = 2.0 * peers * nbytes, float(passes * (peers + 1) * nbytes)
        local = roofline.time(0.0, packing, math.inf) + roofline.time(0.0, placing, math.inf) if peers else 0.0
        return messages_time(levels, peers, nbytes) + local

    return GemmTime(
        moved(x_peers, x_bytes, _COPY_PASSES),
        moved(y_peers, y_bytes, SUM_PASSES),
        moved(y_peers, y_bytes, _COPY_PASSES),
        moved(x_peers, x_bytes, SUM_PASSES),
    )

"""Links between ranks, and groups of ranks that talk to each other.

Source: Dryden et al. 2019, II-B: sending n bytes costs alpha + beta n; links are full-duplex and do not interfere.
"""

from __future__ import annotations

from dataclasses import dataclass

from distconv.errors import MachineError


@dataclass(frozen=True)
class Link:
    """What one rank sees of a link while the other ranks of its node use theirs.

    ``step_s`` is the latency of each step of a collective, where that is not one of a message between two ranks (None):
    a collective's algorithms and its start are not those of a message (V-A has AR and SR apart for that reason).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    step_s: float | None = None

    @property
    def collective_s(self) -> float:
        """Latency of a step of a collective."""
        return self.latency_s if self.step_s is None else self.step_s

    def send(self, nbytes: float) -> float:
        """Seconds to send ``nbytes`` and receive as many.

        >>> Link(latency_s=2.0, bandwidth_bytes_per_s=10.0).send(50)
        7.0
        """
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate: how many, and at most how many of them are on one node.

    Raises
    ------
    MachineError
        If either is less than one.
    """

    ranks: int
    per_node: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1:
            raise MachineError(f"a group of {self.ranks} ranks, {self.per_node} per node: both must be at least 1")

    @property
    def nodes(self) -> int:
        """How many nodes the ranks lie on, at the least."""
        return -(-self.ranks // self.per_node)

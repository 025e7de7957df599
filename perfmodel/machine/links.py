"""Links between ranks, and groups of ranks that communicate.

Source: Dryden et al. 2019, II-B: sending n bytes costs alpha + beta n; links are full-duplex and do not interfere.
"""

from __future__ import annotations

from dataclasses import dataclass

from distconv.errors import MachineError


@dataclass(frozen=True)
class Link:
    """Link as one rank sees it while the other ranks of its node use theirs.

    Source: Dryden et al. 2019, II-B (alpha, beta) and V-A (SR and AR are measured separately).

    Attributes
    ----------
    latency_s : float
        Seconds per message (alpha).
    bandwidth_bytes_per_s : float
        Bytes per second (1 / beta).
    step_s : float or None
        Latency of each step of a collective, whose algorithms and start differ from those of a message. None:
        ``latency_s``.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    step_s: float | None = None

    @property
    def collective_s(self) -> float:
        """Latency of a step of a collective, seconds."""
        return self.latency_s if self.step_s is None else self.step_s

    def send(self, nbytes: float) -> float:
        """Return the time to send ``nbytes`` and receive as many.

        Parameters
        ----------
        nbytes : float
            Bytes in each direction.

        Returns
        -------
        float
            Seconds.

        Examples
        --------
        >>> Link(latency_s=2.0, bandwidth_bytes_per_s=10.0).send(50)
        7.0
        """
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate.

    Attributes
    ----------
    ranks : int
        Number of ranks.
    per_node : int
        Largest number of them on one node.

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
        """Least number of nodes that hold the ranks."""
        return -(-self.ranks // self.per_node)

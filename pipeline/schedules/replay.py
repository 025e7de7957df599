"""Concurrent replay of several lists of actions: each advances as far as it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from .actions import Action

Rank = TypeVar("Rank")


class Replay(Generic[Rank]):
    """Position of each rank in its list.

    Attributes
    ----------
    lists : mapping
        Actions of each rank.
    at : dict
        Number of actions that each rank has done.
    """

    def __init__(self, lists: Mapping[Rank, Sequence[Action]]) -> None:
        self.lists = lists
        self.at = dict.fromkeys(lists, 0)

    def next_action(self, rank: Rank) -> Action | None:
        """Return the next action of ``rank``; None at the end."""
        done, actions = self.at[rank], self.lists[rank]
        return actions[done] if done < len(actions) else None

    def run(self, advance: Callable[[Rank], bool]) -> None:
        """Call ``advance`` for all ranks until none can continue.

        Parameters
        ----------
        advance : callable
            Does one action of a rank and returns True, or returns False if it has to wait.
        """
        # A list, not a generator: every rank gets its turn in each round.
        while any([advance(rank) for rank in self.lists]):
            pass

    @property
    def remaining(self) -> list[Action]:
        """Next actions of the ranks that are not at their end."""
        return [action for action in map(self.next_action, self.lists) if action is not None]

"""Lists of actions that are gone through side by side, each as far as it can come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from .actions import Action

Rank = TypeVar("Rank")


class Replay(Generic[Rank]):
    """How far each rank has come in its list: ``at`` counts the actions that are done."""

    def __init__(self, lists: Mapping[Rank, Sequence[Action]]) -> None:
        self.lists = lists
        self.at = dict.fromkeys(lists, 0)

    def head(self, rank: Rank) -> Action | None:
        """The action whose turn it is; None at the end."""
        done, actions = self.at[rank], self.lists[rank]
        return actions[done] if done < len(actions) else None

    def run(self, advance: Callable[[Rank], bool]) -> None:
        """Until no rank can go on: ``advance`` does one thing for a rank, or says that it has to wait."""
        while any([advance(rank) for rank in self.lists]):
            pass

    @property
    def left(self) -> list[Action]:
        """The heads of those that are not at their end."""
        return [action for action in map(self.head, self.lists) if action is not None]

"""Progress of long work: a bar on a terminal, a line now and then in a log. Rank 0 alone shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, Any

from tqdm import tqdm

ON_TERMINAL_S, IN_LOG_S = 1.0, 10.0
"""How often it is shown anew."""


class _LineBar(tqdm):  # type: ignore[misc]
    """A bar whose every state is a line of its own: a log has no line that could be written over."""

    @staticmethod
    def status_printer(file: IO[str]) -> Callable[[str], None]:
        """What tqdm prints a state with."""

        def show(state: str) -> None:
            if state:
                print(state, file=file, flush=True)

        return show


def bar(*, rank: int, **options: Any) -> tqdm[Any]:
    """Tqdm's bar with these ``options``, as it suits stderr."""
    if sys.stderr.isatty():
        return tqdm(disable=rank != 0, mininterval=ON_TERMINAL_S, **options)
    return _LineBar(disable=rank != 0, mininterval=IN_LOG_S, ascii=True, ncols=100, **options)

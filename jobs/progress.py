"""Progress of long work: a bar on a terminal, a line every ten seconds in a log. Rank 0 alone shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, Any

from tqdm import tqdm

ON_TERMINAL_S, IN_LOG_S = 1.0, 10.0
"""Seconds between updates."""


class _LineBar(tqdm):  # type: ignore[misc]
    """Bar that prints every state on its own line, as lines of a log cannot be overwritten."""

    @staticmethod
    def status_printer(file: IO[str]) -> Callable[[str], None]:
        """Return the function with which tqdm prints a state."""

        def show(state: str) -> None:
            if state:
                print(state, file=file, flush=True)

        return show


def progress_bar(*, rank: int, **options: Any) -> tqdm[Any]:
    """Make a progress bar on stderr, for a terminal or for a log.

    Parameters
    ----------
    rank : int
        Rank of this process. Only rank 0 shows the bar.
    **options
        Keyword arguments of ``tqdm.tqdm``.

    Returns
    -------
    tqdm.tqdm
    """
    if sys.stderr.isatty():
        return tqdm(disable=rank != 0, mininterval=ON_TERMINAL_S, **options)
    return _LineBar(disable=rank != 0, mininterval=IN_LOG_S, ascii=True, ncols=100, **options)

"""Progress is a bar on a terminal and a line now and then in a log."""

from __future__ import annotations

import io
import sys

import pytest

from distconv.jobs import progress


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch):
    """Return the progress lines of a thousand steps without delay."""

    def of(terminal: bool, rank: int = 0) -> str:
        stream = Stream(terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.progress_bar(rank=rank, total=1000, unit="step", file=stream) as bar:
            for _ in range(1000):
                bar.set_postfix_str("loss 1.5", refresh=False)
                bar.update()
        return stream.getvalue()

    return of


def test_a_log_has_whole_lines_and_few(shown) -> None:
    text = shown(terminal=False)
    assert "\r" not in text
    lines = [line for line in text.split("\n") if line]
    assert len(lines) == 2  # the first state and the last
    assert "1000/1000" in lines[-1] and "loss 1.5" in lines[-1]


def test_a_terminal_has_a_bar_that_is_written_over(shown) -> None:
    text = shown(terminal=True)
    assert "\r" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_show_nothing(shown, terminal) -> None:
    assert shown(terminal, rank=1) == ""

"""``distconv bench redistribute``: the printed text."""

from __future__ import annotations

from distconv.jobs.bench.messages import redistribute
from tests.jobs.bench import command

printing = command.printing


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    words = ["--size", "6", "9", "--channels", "3", "--batch", "2", "--repeats", "3"]
    printing.approve("redistribute", redistribute, "redistribute", *words)

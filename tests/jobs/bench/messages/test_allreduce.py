"""``distconv bench allreduce``: the printed text."""

from __future__ import annotations

from distconv.jobs.bench.messages import allreduce
from tests.jobs.bench import command

printing = command.printing


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    printing.approve("allreduce", allreduce, "allreduce", "--width", "2", "--repeats", "3")

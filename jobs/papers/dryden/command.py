"""``distconv reproduce dryden``: the page of the paper's strong-scaling tables, predicted and published.

``--out docs/paper-tables.md`` writes it there. Source: Dryden et al. 2019, VI-B, Tables I, II and III.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distconv.cli import Parser, ended
from distconv.jobs.papers.dryden.page import page
from distconv.jobs.papers.dryden.predictions import Results
from distconv.perfmodel.machine.machine import Machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or write it; 2 and one line on bad input."""
    parser = Parser(prog="paper_tables", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="write the page here instead of printing it")
    options = parser.parse_args(arguments)
    return ended("paper_tables", lambda: _page(options.out), OSError)


def _page(path: str | None) -> None:
    text = page(Results.of(Machine.load("lassen")))
    if path:
        Path(path).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    raise SystemExit(main())

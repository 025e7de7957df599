"""What the jobs that print a paper's tables have in common: ``--json``, and bad input as one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from distconv.cli import Parser, ended

Rows = list[dict[str, object]]
"""A table's figures, one mapping for each row."""


def tables_parser(prog: str, about: str | None) -> Parser:
    """A parser with ``--json``; ``about`` is the job's docstring, of which the first line is shown."""
    parser = Parser(prog=prog, description=(about or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file too")
    return parser


def print_tables(prog: str, tables: Callable[[], Mapping[str, Rows]], path: str | None) -> int:
    """Let ``tables`` print them, write the rows that it returns to ``path``; the exit code."""

    def action() -> None:
        rows = tables()
        if path:
            Path(path).write_text(json.dumps(rows, indent=1))

    return ended(prog, action, OSError)

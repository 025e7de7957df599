"""``python -m distconv.jobs.paper_tables``: the page of the paper's strong-scaling tables, predicted and published.

``--out docs/paper-tables.md`` writes it there. Source: Dryden et al. 2019, VI-B, Tables I, II and III.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from distconv.jobs.paper_predictions import Results
from distconv.jobs.paper_tables_page import page
from distconv.perfmodel.machine import Machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(prog="python -m distconv.jobs.paper_tables", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="write the page here instead of printing it")
    options = parser.parse_args(arguments)
    text = page(Results.of(Machine.load("lassen")))
    if options.out:
        Path(options.out).write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

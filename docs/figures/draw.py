"""Draw the SVG figures of the pages: ``python docs/figures/draw.py`` writes them into this folder.

A test compares them with the files, so a change of what they show changes the figure, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import processes  # noqa: E402
import results  # noqa: E402
import tensors  # noqa: E402

FIGURES = {**tensors.FIGURES, **processes.FIGURES, **results.FIGURES}


def main() -> None:
    """Write all figures."""
    for name, figure in FIGURES.items():
        (HERE / f"{name}.svg").write_text(str(figure()))


if __name__ == "__main__":
    main()

"""The figures of the pages are those that their scripts draw now; pages describe each of them in words."""

from __future__ import annotations

import re
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"
NAMES = sorted(path.stem for path in FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
SMALLEST_LETTERS = 6.5
"""Pixels of a letter's height on a page of 400 pixels."""


@pytest.fixture(scope="module")
def drawn():
    path = list(sys.path)
    yield runpy.run_path(str(FOLDER / "draw.py"))["FIGURES"]
    sys.path[:] = path


def test_every_figure_has_a_script_and_every_script_its_figure(drawn) -> None:
    assert sorted(drawn) == NAMES and len(NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_what_its_script_draws_now(name: str, drawn) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == str(drawn[name]()), "run docs/figures/draw.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_inside_its_frame_and_readable_on_a_small_screen(name: str) -> None:
    root = ET.fromstring((FOLDER / f"{name}.svg").read_text())
    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    assert len(root.find(f"{SVG}title").text) > 60
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size"))
        assert size * 400 / width > SMALLEST_LETTERS, text.text
        x, length = float(text.get("x")), 0.57 * size * len(text.text)  # of a wide font
        left = x - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
        assert left >= -4 and left + length <= width + 8, text.text
        assert 0 < float(text.get("y")) <= height
    for shape in root.findall(f"{SVG}rect")[1:]:
        x, y, w, h = (float(shape.get(side)) for side in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 2 and y + h <= height


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_the_figure_and_describes_it(name: str) -> None:
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    described = [words for page in pages for words in re.findall(rf"!\[([^\]]*)\]\([./]*figures/{name}\.svg\)", page)]
    assert described and all(len(words) > 20 for words in described)

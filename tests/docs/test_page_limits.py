"""Limits of pages, paragraphs and tables, so that pages stay readable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
USER_PAGES = [path for path in PAGES if "evidence" not in path.parts]

MOST_WORDS, MOST_WORDS_OF_USER_PAGES, MOST_WORDS_OF_A_PARAGRAPH, MOST_LINES_OF_README = 1500, 35_000, 120, 90


def test_pages_have_few_words() -> None:
    words = {path: len(path.read_text().split()) for path in PAGES}
    assert not {str(path): count for path, count in words.items() if count > MOST_WORDS}
    assert sum(words[path] for path in USER_PAGES) <= MOST_WORDS_OF_USER_PAGES
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES_OF_README


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_paragraphs_are_short_and_columns_have_headers(path: Path) -> None:
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", path.read_text(), flags=re.M | re.S)
    paragraphs = [part for part in text.split("\n\n") if not part.lstrip().startswith(("|", "- ", "1. ", ":::"))]
    assert not [part for part in paragraphs if len(part.split()) > MOST_WORDS_OF_A_PARAGRAPH]
    tables = [part for part in text.split("\n\n") if part.lstrip().startswith("|")]
    headers = [[cell.strip() for cell in table.strip().splitlines()[0].strip("|").split("|")] for table in tables]
    assert all(cell for header in headers for cell in header), headers

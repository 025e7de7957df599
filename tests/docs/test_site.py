"""The site of the pages: Sphinx has nothing to say, every link leads somewhere, and nothing comes from a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest

import distconv as dc
from distconv import cli
from tests.docs.blocks import ROOT

pytestmark = pytest.mark.time_limit(600)  # the first test builds the site, which takes minutes on a busy machine


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and the places in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.loaded += [found[name] for name in ("src", "href") if tag in ("script", "img", "link") and name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-n",
        "-q",
        "-d",
        folder / "doctrees",
        ROOT / "docs",
        folder / "html",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


@pytest.mark.long
def test_every_link_leads_to_a_page_and_a_place_in_it(pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in pages[target].places):
                lost.append((path.name, link))
    assert not lost and sum(len(page.links) for page in pages.values()) > 1000


def test_nothing_is_loaded_from_a_network(site: Path, pages: dict[Path, Page]) -> None:
    assert not [link for page in pages.values() for link in page.loaded if urlsplit(link).netloc]
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert styles and not [style for style in styles if re.search(r"url\(['\"]?https?:|@import", style)]


def test_every_name_and_every_option_has_a_place(site: Path, pages: dict[Path, Page]) -> None:
    for name in dc.__all__:
        assert f"distconv.{name}" in pages[site / "reference" / "api" / f"{name}.html"].places
    for words in cli.COMMANDS:
        places = pages[site / "reference" / "commands" / f"{'-'.join(words)}.html"].places
        assert f"command-{'-'.join(words)}" in places
        assert any(place.startswith(f"cmdoption-distconv-{'-'.join(words)}-") for place in places)


def dom(path: Path, query: str = "") -> str:
    """Return a page as Chromium renders it from a file."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs the package chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    return subprocess.run([browser, *options, f"{path.as_uri()}{query}"], capture_output=True, text=True).stdout


PAGES_FOUND_FIRST = {
    "halo": "explanation/how-it-works",
    "freeze": "how-to/freeze-layers",
    "cite": "reference/citation",
    "FSDP": "how-to/combine-with-fsdp",
    "custom operator": "how-to/custom-operators",
    "bf16": "how-to/mixed-precision",
    "NumPy": "reference/pytorch-features",
    "threads": "reference/variables",
    "batch norm": "explanation/batch-norm",
    "checkpoint": "how-to/checkpoints",
    "slow rank": "how-to/profile",
    "datasets": "how-to/read-data",
    "hang": "how-to/troubleshooting",
    "netCDF": "how-to/data-formats",
}
"""The first result of searches for these words."""


@pytest.mark.slow
@pytest.mark.parametrize("words", PAGES_FOUND_FIRST)
def test_a_search_finds_the_right_page_first_and_shows_an_excerpt(site: Path, words: str) -> None:
    found = dom(site / "search.html", f"?q={quote(words)}")
    results = re.findall(r'<li[^>]*><a href="([^"#]+)\.html.*?</li>', found.split('id="search-results"')[1], re.S)
    assert results and results[0] == PAGES_FOUND_FIRST[words], results[:5]
    assert '<p class="context">' in found

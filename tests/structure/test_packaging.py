"""Recipes of other package managers and the citation say what pyproject.toml says."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSION = re.search(r'^version = "(.+)"', PROJECT, re.M).group(1)
DEPENDENCIES = dict(
    re.fullmatch(r"([\w-]+)(?:>=([\d.,<]+))?", text).groups("")
    for text in re.findall(r'"(.+?)"', re.search(r"^dependencies = \[(.+)\]", PROJECT, re.M).group(1))
)
PYTHON = re.search(r'^requires-python = ">=(.+)"', PROJECT, re.M).group(1)
EXPECTED = {**DEPENDENCIES, "python": PYTHON}


def test_conda_recipe():
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    found = dict((*text.split(" >="), "")[:2] for text in recipe["requirements"]["run"])
    found["torch"] = found.pop("pytorch")
    assert found == EXPECTED and recipe["package"]["version"] == VERSION


def test_spack_recipe():
    text = (ROOT / "packaging" / "spack" / "package.py").read_text()
    found = re.findall(r'depends_on\("(?:py-)?([\w-]+)(?:@([\d.]+):([\d.]*))?", type=\("build", "run"\)\)', text)
    # A range of Spack's includes its end: 2.13 is all of 2.13.x.
    above = {last: re.sub(r"\d+$", lambda digits: str(int(digits[0]) + 1), last) for *_, last in found}
    bounds = {name: f"{first},<{above[last]}" if last else first for name, first, last in found}
    assert bounds == EXPECTED and f'version("{VERSION}")' in text


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["cff-version"] == "1.2.0"

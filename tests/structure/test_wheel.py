"""What a wheel holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.structure.modules import BELOW, ROOT, sources


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources that has no links."""
    place = tmp_path_factory.mktemp("wheel")
    copy = place / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("distconv", *BELOW):
        shutil.copytree(ROOT / folder, copy / folder, ignore=_links_and_caches)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*command, str(copy)], check=True, capture_output=True, text=True)
    return next(place.glob("*.whl"))


def _links_and_caches(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or (Path(folder) / name).is_symlink()]


@pytest.mark.time_limit(180)
def test_a_wheel_holds_every_module_under_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"distconv", "distconv-0.1.0.dist-info"}
    assert len(names) == len(set(names))
    modules = {name for name in names if name.endswith(".py")}
    packaged = {name[: -len(".py")].replace("/", ".").removesuffix(".__init__") for name in modules}
    assert packaged == set(sources(wheel.parent / "source"))
    assert "distconv/py.typed" in names


@pytest.mark.time_limit(180)
def test_a_wheel_imports_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "import distconv.layers, distconv.jobs; print(distconv.layers.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(tmp_path / "site" / "distconv" / "layers" / "__init__.py")

"""Files of a wheel."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from distconv.cli import COMMANDS
from tests.structure.modules import BELOW, OURS, ROOT, SOURCES, sources


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources that has no links."""
    place = tmp_path_factory.mktemp("wheel")
    copy = place / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("distconv", *BELOW):
        shutil.copytree(ROOT / folder, copy / folder, ignore=_links_and_caches)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*command, str(copy)], check=True, capture_output=True, text=True)
    return next(place.glob("*.whl"))


def _links_and_caches(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__" or (Path(folder) / name).is_symlink()]


IN_THE_WHEEL = """
    train data plan predict explore profile simulate run checkpoint info conformance verify-exactness verify-conformance
    bench-step bench-halo bench-redistribute bench-allreduce bench-layer bench-memory bench-scaling bench-pipeline
    bench-plans bench-sparse bench-scan
"""
"""Commands for users; the others need a checkout."""


def modules_of(wheel: Path) -> set[str]:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return {name[: -len(".py")].replace("/", ".").removesuffix(".__init__") for name in names}


@pytest.mark.long
@pytest.mark.time_limit(180)
def test_a_wheel_holds_the_package_under_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"distconv", "distconv-0.1.0.dist-info"}
    assert len(names) == len(set(names))
    assert not (wheel.parent / "source" / "build").exists()
    absent = set(sources(wheel.parent / "source")) - modules_of(wheel)
    assert {".".join(name.split(".")[:3]) for name in absent} == {
        "distconv.jobs.bench",
        "distconv.jobs.papers",
        "distconv.jobs.verification",
    }
    assert "distconv/py.typed" in names and not [name for name in names if "papers" in name]


@pytest.mark.long
def test_a_wheel_holds_the_commands_for_users_and_what_they_import(wheel: Path) -> None:
    held = modules_of(wheel)
    there = {"-".join(words) for words, command in COMMANDS.items() if command.module in held}
    wanted = IN_THE_WHEEL.split()
    assert there == {"-".join(w) for w in COMMANDS if w[0] in wanted or "-".join(w) in wanted}
    assert not [str(entry) for entry in OURS if entry.module in held and entry.target not in held]


@pytest.mark.long
@pytest.mark.time_limit(180)
def test_other_commands_say_in_one_line_that_they_need_a_checkout(installed: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    commands = [["reproduce", "dryden"], ["verify", "soak"], ["bench", "gpu", "--help"]]
    code = f"from distconv.cli import main\nfor command in {commands}:\n    print(main(command))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["2", "2", "2"]
    for line, command in zip(ended.stderr.splitlines(), commands, strict=True):
        assert line.startswith(f"distconv {' '.join(command[:2])}: ")
        assert line.endswith(f"checkout of distconv's repository run python -m distconv {' '.join(command[:2])}")


def test_all_that_is_left_out_is_there_to_be_left_out() -> None:
    (listed,) = re.findall(r"^LEFT_OUT = (\[.*?^\])", (ROOT / "setup.py").read_text(), re.DOTALL | re.MULTILINE)
    for pattern in ast.literal_eval(listed):
        assert fnmatch.filter(SOURCES, pattern), pattern


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """An environment's folder with the wheel installed."""
    zipfile.ZipFile(wheel).extractall(wheel.parent / "site")
    return wheel.parent / "site"


@pytest.mark.long
@pytest.mark.time_limit(180)
def test_a_script_beside_a_clone_finds_the_package(installed: Path, tmp_path: Path) -> None:
    """A folder called distconv is a package to Python unless it finds a proper one on its path."""
    (tmp_path / "distconv").symlink_to(ROOT)
    (tmp_path / "train.py").write_text(
        "import distconv as dc, distconv.layers, distconv.jobs\nprint(dc.ProcessGrid, distconv.layers.__file__)\n"
    )
    # As an environment does it: .pth files count, and the script's folder comes first. This one's package is left out.
    others = "sys.path[:] = [path for path in sys.path if not os.path.exists(os.path.join(path, 'distconv'))]"
    start = f"import os, site, sys\n{others}\nsite.addsitedir({str(installed)!r})"
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(start)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "start")}
    ended = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    layers = installed / "distconv" / "layers" / "__init__.py"
    assert ended.stdout == f"<class 'distconv.grid.ProcessGrid'> {layers}\n"


@pytest.mark.time_limit(180)
def test_an_sdist_holds_documents_constraints_scripts_and_tests(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs")
    checkout = shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=ignored)
    code = f"from setuptools import build_meta\nbuild_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=checkout, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "CHANGELOG.md", "constraints.txt", "docs/index.md", "jobs/quickstart.sh", "tests/run.py"}
    assert wanted <= names
    assert {"layers/nn/pooling.py", "distconv/grid.py", "perfmodel/machine/builtin/lassen.yaml"} <= names
    assert {"jobs/papers/dryden/command.py", "jobs/papers/sparsepipe/vgg16_bn-50-batch16.json"} <= names
    assert not any(name.startswith("distconv/layers") or "__pycache__" in name for name in names)

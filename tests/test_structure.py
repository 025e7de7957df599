"""The order of dependence between the folders, the refusal of bare imports, and what a wheel holds."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BELOW = {
    "kernels": set(),
    "layers": {"kernels"},
    "perfmodel": {"kernels"},
    "pipeline": {"kernels", "layers", "perfmodel"},
    "jobs": {"kernels", "layers", "perfmodel", "pipeline"},
}
"""Whom each folder may import, besides the core."""

CORE_EXCEPTIONS = {("distconv", "layers")}
"""``distconv`` fills its operator registry when it is imported. (The command line loads jobs in a function.)"""


@dataclass(frozen=True)
class Import:
    """One import line. ``at_import``: it runs when its module is imported, not in a function or for types alone."""

    module: str
    target: str
    line: int
    at_import: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: imports {self.target}"


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its dotted name, each once."""
    found = {}
    for folder, prefix in [("distconv", "distconv"), *((name, f"distconv.{name}") for name in BELOW)]:
        for path in sorted(real_files(root / folder)):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


def real_files(folder: Path) -> Iterator[Path]:
    """Python files below ``folder``, not through links."""
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not (Path(where) / name).is_symlink() and name != "__pycache__"]
        yield from (Path(where) / name for name in files if name.endswith(".py"))


SOURCES = sources()


def imports(module: str) -> list[Import]:
    """All imports of one module, with relative ones resolved and ``from package import module`` told from a name."""
    found: list[Import] = []

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            at_import = False
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, at_import)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(module, alias.name, node.lineno, at_import) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = absolute(module, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append(Import(module, inner if inner in SOURCES else base, node.lineno, at_import))
        for child in ast.iter_child_nodes(node):
            visit(child, at_import)

    visit(ast.parse(SOURCES[module].read_text()), True)
    return found


def absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def folder_of(module: str) -> str | None:
    """The top-level folder of a module of ours, None for the core."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else None


ALL_IMPORTS = [entry for module in SOURCES for entry in imports(module)]
OURS = [entry for entry in ALL_IMPORTS if entry.target.split(".")[0] == "distconv"]


def test_folders_import_only_what_lies_below_them() -> None:
    """In functions too: a lazy import upwards is still a circle."""
    wrong = []
    for entry in OURS:
        here, there = folder_of(entry.module), folder_of(entry.target)
        if here is not None and there not in (None, here) and there not in BELOW[here]:
            wrong.append(str(entry))
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_no_folder_at_import_time() -> None:
    wrong = []
    for entry in OURS:
        there = folder_of(entry.target)
        if (
            folder_of(entry.module) is None
            and there
            and entry.at_import
            and (entry.module, there) not in CORE_EXCEPTIONS
        ):
            wrong.append(str(entry))
    assert not wrong, "\n".join(wrong)


def test_kernels_never_import_mpi4py() -> None:
    wrong = [str(e) for e in ALL_IMPORTS if folder_of(e.module) == "kernels" and e.target.split(".")[0] == "mpi4py"]
    assert not wrong, "\n".join(wrong)


def test_no_module_names_a_folder_by_its_bare_name() -> None:
    wrong = [str(entry) for entry in ALL_IMPORTS if entry.target.split(".")[0] in BELOW]
    assert not wrong, "\n".join(wrong)


def test_modules_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for entry in OURS:
        if entry.at_import and entry.target != entry.module and entry.target in SOURCES:
            graph[entry.module].add(entry.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("folder", sorted(BELOW))
def test_a_bare_import_of_a_folder_fails_with_a_sentence(folder: str) -> None:
    ended = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode != 0
    assert f"import this package as distconv.{folder}" in ended.stderr


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_examples_in_docstrings_are_right(module: str) -> None:
    if ">>>" not in SOURCES[module].read_text():
        return
    failures, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failures


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

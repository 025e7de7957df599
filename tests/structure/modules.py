"""The modules of the package and what they import, read from their sources."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


BELOW = {
    "kernels": set(),
    "layers": {"kernels"},
    "perfmodel": {"kernels", "layers"},
    "pipeline": {"kernels", "layers", "perfmodel"},
    "jobs": {"kernels", "layers", "perfmodel", "pipeline"},
}
"""Whom each folder may import, besides the core."""


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


@cache
def parsed(module: str) -> ast.Module:
    """Return the tree of a module."""
    return ast.parse(SOURCES[module].read_text())


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

    visit(parsed(module), True)
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

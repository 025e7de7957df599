"""Public functions that raise say so: a section "Raises" names each error."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.structure.modules import SOURCES, parsed

CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
"""Methods whose exceptions are documented in the docstring of the class or of the method."""


@dataclass(frozen=True)
class Raiser:
    """A public function, the errors that its own body makes and raises, and the docstrings that may name them."""

    name: str
    line: int
    errors: tuple[str, ...]
    docstrings: tuple[str, ...]

    @property
    def unsaid(self) -> list[str]:
        """Errors that no section "Raises" names."""
        said = {name for docstring in self.docstrings for name in raises_section(docstring)}
        return [error for error in self.errors if error not in said]


def raises_section(docstring: str) -> list[str]:
    """The errors in the section "Raises" (numpy convention): its lines that are not indented."""
    match = re.search(r"^Raises\n------\n(.*?)(?=^\w+\n---|\n\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    return [line for line in match[1].splitlines() if line and line[0] != " "] if match else []


def raised(function: ast.AST) -> Iterator[str]:
    """Classes whose instances the body makes and raises, without functions and classes inside of it.

    ``raise NotImplementedError`` says that a rule is missing, a name in small letters that another function made it.
    """
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).split(".")[-1]
            if name[0].isupper() and name != "NotImplementedError":
                yield name
        yield from raised(node)


def raisers(tree: ast.Module | ast.ClassDef) -> Iterator[Raiser]:
    """Public functions and methods that raise, those of public classes too."""
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    above = ast.get_docstring(tree) or ""
    for node in functions:
        if node.name.startswith("_") and node.name not in CONSTRUCTORS:
            continue
        # A property's setter has no docstring of its own.
        texts = [ast.get_docstring(other) or "" for other in functions if other.name == node.name]
        docstrings = (*texts, above) if node.name in CONSTRUCTORS else tuple(texts)
        if errors := tuple(dict.fromkeys(raised(node))):
            yield Raiser(node.name, node.lineno, errors, docstrings)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from raisers(node)


PUBLIC = sorted(module for module in SOURCES if not any(part.startswith("_") for part in module.split(".")))


def test_public_functions_that_raise_say_so() -> None:
    wrong = [
        f"{SOURCES[module]}, line {each.line}: {each.name} raises {', '.join(each.unsaid)} without saying so"
        for module in PUBLIC
        for each in raisers(parsed(module))
        if each.unsaid
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_not_said_is_found() -> None:
    said = '"""Nothing.\n\nRaises\n------\nerrors.GridError\n    Never.\nValueError\n    Always.\n"""'
    source = f"""
def said(): {said}; raise ValueError("x")
def unsaid():
    if True: raise errors.ValueError("x")
    def inner(): raise KeyError("x")
def _private(): raise ValueError("x")
"""
    assert {each.name: each.unsaid for each in raisers(ast.parse(source))} == {"said": [], "unsaid": ["ValueError"]}

"""CONTRIBUTING's section "Language" holds: docstrings, messages, class names and pages."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from tests.structure.modules import ROOT, SOURCES, parsed

OPENINGS = re.compile(r"(What|Whether|That of|Those|Of|Let)\b")
"""Words that no docstring begins with."""

BANNED = re.compile(
    r"\b(anew|alike|whoever|besides?|to be had|without a word|in turns|behind the)\b",
    re.IGNORECASE,
)
"""Words of docstrings and messages that have a plainer term."""

DOCUMENTED = re.compile(r"^(Parameters|Attributes)\n-+$", re.MULTILINE)
RETURNS = re.compile(r"^(Returns|Yields)\n-+$", re.MULTILINE)

PATHS = {str(path.relative_to(ROOT)): module for module, path in sorted(SOURCES.items(), key=lambda each: each[1])}
"""Modules by path."""

Definition = ast.FunctionDef | ast.ClassDef | ast.Module


@cache
def nodes(path: str) -> list[ast.AST]:
    """Return all nodes of a file."""
    return list(ast.walk(parsed(PATHS[path])))


def definitions(path: str) -> Iterator[tuple[Definition, str]]:
    """Yield the module and all its functions and classes with their docstrings."""
    for node in nodes(path):
        if isinstance(node, Definition):
            yield node, ast.get_docstring(node) or ""


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a module, and the methods of its classes, whose names and classes are public."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not is_exempt(node):
            yield node


def is_exempt(node: ast.FunctionDef) -> bool:
    """Return True for overloads, properties and operators of torch: parameters are absent or documented elsewhere."""
    names = {ast.unparse(each).split("(")[0].rpartition(".")[2] for each in node.decorator_list}
    return bool(names & {"overload", "property", "cached_property", "setter", "implements"})


def is_condition(text: str) -> bool:
    """Return True if the first line of a docstring says what is returned, True or False."""
    return text.startswith("Return True if")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    texts = [(path, text) for path in PATHS for _, text in definitions(path)]
    assert not [(path, text.split("\n")[0]) for path, text in texts if OPENINGS.match(text)]


def test_public_functions_describe_parameters_and_results() -> None:
    lacking = []
    for path, node in [(each, node) for each in PATHS for node in public_functions(parsed(PATHS[each]).body)]:
        text, arguments = ast.get_docstring(node) or "", node.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if len([name for name in names if name not in ("self", "cls")]) >= 2 and not DOCUMENTED.search(text):
            lacking.append(f"{path}: {node.name}: Parameters")
        returned = node.returns
        if returned is not None and ast.unparse(returned) not in ("None", "NoReturn") and not RETURNS.search(text):
            lacking += [f"{path}: {node.name}: Returns"] if DOCUMENTED.search(text) and not is_condition(text) else []
    assert not lacking


def test_docstrings_and_messages_have_plain_words() -> None:
    texts = [(path, text) for path in PATHS for _, text in definitions(path)]
    for path, node in [(each, node) for each in PATHS for node in nodes(each)]:
        if isinstance(node, ast.Raise):
            texts += [(path, each.value) for each in ast.walk(node) if _is_text(each)]
    assert not [f"{match[0]!r} in {path}: {text[:60]!r}" for path, text in texts for match in BANNED.finditer(text)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/**/*.md")]
    if path.name != "CHANGELOG.md"
)


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_plain_words(page: str) -> None:
    assert not [line for line in (ROOT / page).read_text().splitlines() if BANNED.search(line)]


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(node.name for path in PATHS for node, _ in definitions(path) if isinstance(node, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1}

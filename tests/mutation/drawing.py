"""Random mutations of Python source: possible edits of a module, and a draw among all modules by seed.

An edit replaces a range of the source text, so comments and line numbers stay. Code that cannot change a result is left
out: annotations, docstrings, messages and other strings, ``__all__``, ``if TYPE_CHECKING``, asserts that narrow types.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import difflib
import itertools
import math
import random
import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.structure.modules import sources

COMPARISONS = {"<": "<= >=", "<=": "< >", ">": ">= <=", ">=": "> <", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is_not", "is not": "is", "in": "not_in", "not in": "in"}
ARITHMETIC = dict(zip("+ - * / // % ** << >> & | ^".split(), "- + + * * // * >> << | & &".split(), strict=True))
BOOLEAN = {"and": "or", "or": "and"}
PAIRS = {
    "min/max": "min max, amin amax, argmin argmax, minimum maximum, fmin fmax, cummin cummax, MIN MAX, MINLOC MAXLOC",
    "all/any": "all any",
    "dtype": "float32 float64, float double, float16 bfloat16, int32 int64, int long, uint8 int8, complex64 complex128",
}
OTHER = {
    name: (kind, other)
    for kind, pairs in PAIRS.items()
    for pair in pairs.split(", ")
    for name, other in itertools.permutations(pair.split())
}
"""The kind of a word and the word that replaces it."""
OTHER_AXIS = {"n": "c", "c": "h", "d": "h", "h": "w", "w": "h"}
AXIS_KEYWORDS = {"dim", "dims", "axis", "axes", "root", "source", "dest", "start_dim", "end_dim"}
INDEXED_BY_AXIS = {"shape", "axes", "dims", "strides", "coords"}
RETURNS = {"bool": "not ({})", "int": "({}) + 1", "float": "({}) * 2", "Tensor": "({}) * 2", "str": '""'}
RETURNS |= {"tuple": "()", "list": "[]", "dict": "{{}}", "set": "set()"}
"""Replacement for a returned value, by the return annotation of the function; None for other annotations."""
NO_ERROR = "ArithmeticError"
"""An exception that nothing raises or catches, in place of another one."""
KEPT_DECORATORS = {"overload", "abstractmethod", "wraps", "final", "override", "kernel"}
KEPT_KEYWORDS = {"help", "metavar", "description", "epilog", "cache", "slots", "maxsize", "stacklevel"}
SYMMETRIC = {"min", "max", "minimum", "maximum", "gcd", "lcm", "add", "mul", "logical_and", "logical_or", "equal"}
FOR_TYPES = {"cast", "TypeVar", "NewType", "ParamSpec"}
NARROWING = re.compile(r"isinstance\(|issubclass\(|callable\(|is not None")


class Edit(NamedTuple):
    """A replacement of the bytes from ``start`` to ``end`` of a module."""

    line: int
    kind: str
    start: int
    end: int
    new: str


class Mutation(NamedTuple):
    """A drawn change of one module; ``number`` counts from 1."""

    number: int
    path: str
    line: int
    kind: str
    source: str
    mutated: str

    def __str__(self) -> str:
        return f"{self.number} {self.path}:{self.line} {self.kind}"

    @property
    def diff(self) -> str:
        texts = (text.splitlines() for text in (self.source, self.mutated))
        return "\n".join(difflib.unified_diff(*texts, f"a/{self.path}", f"b/{self.path}", n=2, lineterm=""))


def draw(
    modules: Mapping[str, bytes], seed: int, count: int, since: Mapping[str, set[int]] | None = None
) -> list[Mutation]:
    """Return up to ``count`` different mutations: a uniform choice of a line, then of a kind, then of an edit.

    ``since`` maps paths to the lines that are allowed.
    """
    lines: list[tuple[str, list[Edit]]] = []
    for path in sorted(modules):
        allowed = None if since is None else since.get(path, set())
        found = sorted(edit for edit in find_edits(modules[path]) if allowed is None or edit.line in allowed)
        lines += [(path, list(group)) for _, group in itertools.groupby(found, lambda edit: edit.line)]
    chosen = random.Random(seed)
    drawn: list[Mutation] = []
    while lines and len(drawn) < count:
        at = chosen.randrange(len(lines))
        path, edits = lines[at]
        kind = chosen.choice(sorted({edit.kind for edit in edits}))
        edit = chosen.choice([edit for edit in edits if edit.kind == kind])
        edits.remove(edit)
        if not edits:
            del lines[at]
        source = modules[path]
        mutated = source[: edit.start] + edit.new.encode() + source[edit.end :]
        if _is_other_code(source, mutated):
            drawn.append(Mutation(len(drawn) + 1, path, edit.line, kind, source.decode(), mutated.decode()))
    return drawn


def _is_other_code(source: bytes, mutated: bytes) -> bool:
    """Return True if the mutated module is valid Python with another syntax tree."""
    with warnings.catch_warnings(), contextlib.suppress(SyntaxError):
        warnings.simplefilter("ignore")
        compile(mutated, "mutated", "exec")
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(mutated))
    return False


def modules_of(root: Path, folder: str = "") -> dict[str, bytes]:
    """Return the sources of the modules whose path begins with ``folder``."""
    names = {str(path.relative_to(root)): path for path in sources(root).values()}
    return {name: path.read_bytes() for name, path in names.items() if name.startswith(folder)}


def changed_lines(root: Path, revision: str) -> dict[str, set[int]]:
    """Return the lines of each file changed since the common ancestor with ``revision``; untracked files count."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=root, check=True, stdout=-1, text=True).stdout.splitlines()

    plain = ("--no-ext-diff", "--no-color", "--dst-prefix=b/", "--relative", "-U0")
    changed: dict[str, set[int]] = {}
    path = ""
    for line in git("diff", *plain, "--merge-base", revision, "--", "*.py"):
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            changed.setdefault(path, set()).update(range(first, first + count))
    for path in git("ls-files", "--others", "--exclude-standard", "--", "*.py"):
        changed[path] = set(range(1, (root / path).read_bytes().count(b"\n") + 1))
    return changed


def find_edits(source: bytes) -> list[Edit]:
    """Return all edits of a module."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    """Collects the edits of a module. What a method does not visit gets none."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        self.found: list[Edit] = []
        self.assigned: Counter[str] = Counter()  # how often the current function assigns each name
        self.function: ast.FunctionDef | None = None

    # -- edits of ranges -----------------------------------------------------------------------------------------------

    def start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, first: ast.AST, last: ast.AST | None = None) -> str:
        return self.source[self.start(first) : self.end(last or first)].decode()

    def add(self, kind: str, start: int, end: int, new: str) -> None:
        """Add an edit; empty lines make up for those that it removes."""
        missing = self.source.count(b"\n", start, end) - new.count("\n")
        self.found.append(Edit(bisect.bisect_right(self.starts, start), kind, start, end, new + "\n" * missing))

    def replace(self, kind: str, node: ast.AST, new: str) -> None:
        """Replace an expression, in parentheses where they must hold its lines together."""
        missing = "\n" * (self.text(node).count("\n") - new.count("\n"))
        self.add(kind, self.start(node), self.end(node), f"({new}{missing})" if missing else new)

    def drop(self, node: ast.AST) -> None:
        self.add("statement", self.start(node), self.end(node), "pass")

    def swap(self, kind: str, one: ast.AST, two: ast.AST) -> None:
        between = self.source[self.end(one) : self.start(two)].decode()
        self.add(kind, self.start(one), self.end(two), self.text(two) + between + self.text(one))

    def change_operator(self, kind: str, left: ast.AST, right: ast.AST, table: Mapping[str, str]) -> None:
        """Replace the operator that stands between two operands."""
        symbols = "|".join(map(re.escape, sorted(table, key=len, reverse=True)))
        if found := re.compile(symbols.encode()).search(self.source, self.end(left), self.start(right)):
            for new in table[found[0].decode()].split():
                self.add(kind, *found.span(), new.replace("_", " "))

    # -- expressions ---------------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in itertools.pairwise([node.left, *node.comparators]):
            self.change_operator("comparison", left, right, COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in itertools.pairwise(node.values):
            self.change_operator("boolean", left, right, BOOLEAN)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(self.text(side).endswith(('"', "'")) for side in (node.left, node.right)):
            self.change_operator("arithmetic", node.left, node.right, ARITHMETIC)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        kind = "boolean" if isinstance(node.op, ast.Not) else "arithmetic"
        self.add(kind, self.start(node), self.start(node.operand), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant, kind: str = "") -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace(kind or "boolean", node, str(not value))
        elif isinstance(value, (int, float)) and math.isfinite(value):
            self.replace(kind or "constant", node, repr(value + 1))
            self.replace(kind or "constant", node, repr(value - 1))
        elif isinstance(value, str) and value in OTHER_AXIS:
            self.replace("axis, rank", node, f'"{OTHER_AXIS[value]}"')
        elif isinstance(value, str) and OTHER.get(value, ("",))[0] == "dtype":
            self.replace("dtype", node, f'"{OTHER[value][1]}"')

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave messages out; before Python 3.12 the positions inside are wrong, too."""

    def visit_Name(self, node: ast.Name) -> None:
        if OTHER.get(node.id, ("dtype",))[0] != "dtype":  # a bare `int` or `float` is not a dtype
            self.replace(OTHER[node.id][0], node, OTHER[node.id][1])
        if node.id in ("rank", "root", "dim") and isinstance(node.ctx, ast.Load):
            self.replace("axis, rank", node, f"({node.id} + 1)")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in OTHER:
            self.add(OTHER[node.attr][0], self.end(node) - len(node.attr), self.end(node), OTHER[node.attr][1])
        if node.attr in ("rank", "root") and isinstance(node.ctx, ast.Load):
            self.replace("axis, rank", node, f"({self.text(node)} + 1)")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        self.visit_of_axis(node.slice, isinstance(node.value, ast.Attribute) and node.value.attr in INDEXED_BY_AXIS)

    def visit_of_axis(self, value: ast.expr, is_axis: bool) -> None:
        if is_axis and isinstance(value, ast.Constant):
            self.visit_Constant(value, "axis, rank")
        else:
            self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.text(node.func).rpartition(".")[2]
        if name in FOR_TYPES:
            for value in node.args[1:]:
                self.visit(value)
            return
        kept = [each for each in node.keywords if each.arg in KEPT_KEYWORDS or (name, each.arg) == ("zip", "strict")]
        arguments = sorted([*node.args, *node.keywords], key=self.start)
        for i, each in enumerate(arguments):
            if each not in kept and (len(arguments) > 1 or isinstance(each, ast.keyword)):
                is_last = i == len(arguments) - 1
                first = self.end(arguments[i - 1]) if i and is_last else self.start(each)
                self.add("argument", first, self.end(each) if is_last else self.start(arguments[i + 1]), "")
        for one, two in itertools.pairwise(node.args):
            if name not in SYMMETRIC and not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                self.swap("argument", one, two)
        self.visit(node.func)
        for value in node.args:
            self.visit(value)
        for keyword in node.keywords:
            if keyword not in kept:
                self.visit_of_axis(keyword.value, keyword.arg in AXIS_KEYWORDS)

    # -- branches ------------------------------------------------------------------------------------------------------

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        if self.text(node.test).endswith("TYPE_CHECKING"):
            return
        self.change_test(node.test, "False", "True")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_While(self, node: ast.While) -> None:
        self.change_test(node.test, "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.change_test(test, "True")
        self.generic_visit(node)

    def change_test(self, test: ast.expr, *constants: str) -> None:
        if not isinstance(test, ast.Constant):
            for new in (f"not ({self.text(test)})", *constants):
                self.replace("branch", test, new)

    # -- statements ----------------------------------------------------------------------------------------------------

    visit_Break = visit_Continue = drop

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.drop(node)
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if "__all__" in map(self.text, node.targets):
            return
        if all(self.assigned[name] > 1 for target in node.targets for name in _assigned(target)):
            self.drop(node)  # any other name would be missing at its first use
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.change_operator("arithmetic", node.target, node.value, ARITHMETIC)
        self.drop(node)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        self.replace("statement", node.iter, "()")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        if not any(item.optional_vars for item in node.items):
            self.add("statement", self.start(node), self.end(node.items[-1].context_expr), "if True")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        if not NARROWING.search(self.text(node)):
            self.visit(node.test)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave the arguments out: most are messages."""
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if error is None or self.text(error) != "NotImplementedError":
            self.drop(node)
            if error:
                self.replace("exception", error, NO_ERROR)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for error in node.type.elts if isinstance(node.type, ast.Tuple) else [node.type] if node.type else []:
            self.replace("exception", error, NO_ERROR)
        for child in node.body:
            self.visit(child)

    def visit_Return(self, node: ast.Return) -> None:
        if self.function and node is not self.function.body[-1]:
            self.drop(node)
        if node.value and self.text(node.value) != "None":
            declared = self.text(self.function.returns) if self.function and self.function.returns else ""
            form = RETURNS.get(declared.partition("[")[0].rpartition(".")[2], "None")
            self.replace("returned value", node.value, form.format(self.text(node.value)))
            if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
                self.swap("returned value", *node.value.elts[:2])
            self.visit(node.value)

    # -- definitions ---------------------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if "overload" in map(self.text, node.decorator_list):
            return
        self.visit_decorators(node)
        self.visit(node.args)
        outside = self.assigned, self.function
        parameters = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
        self.assigned, self.function = Counter([*parameters, *_assigned(node)]), node
        for child in node.body:
            self.visit(child)
        self.assigned, self.function = outside

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_decorators(node)
        if any(self.text(base).endswith("Enum") for base in node.bases):
            return
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and child.value and not isinstance(child.value, ast.Call):
                self.change_default(child.value)
            else:
                self.visit(child)

    def visit_decorators(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for each in node.decorator_list:
            name = self.text(each.func if isinstance(each, ast.Call) else each).rpartition(".")[2]
            if name not in KEPT_DECORATORS:
                self.add("decorator", self.source.rindex(b"@", 0, self.start(each)), self.end(each), "")
            self.visit(each)

    def visit_arguments(self, node: ast.arguments) -> None:
        for value in filter(None, [*node.defaults, *node.kw_defaults]):
            self.change_default(value)

    def change_default(self, value: ast.expr) -> None:
        if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
            self.visit_Constant(value, "default")
        else:
            self.replace("default", value, "0" if self.text(value) == "None" else "None")


def _assigned(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]

"""The tool that draws mutations: its edits, its draw, and its outcomes in a checkout of one module."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation import __main__ as mutation
from tests.mutation import drawing, running

FUNCTION = "def f(a) -> {}:\n    {}\n"


def edited(source: str) -> set[tuple[str, str]]:
    """The kind of each edit, and the module with it."""
    text = source.encode()
    return {
        (edit.kind, (text[: edit.start] + edit.new.encode() + text[edit.end :]).decode())
        for edit in drawing.find_edits(text)
    }


@pytest.mark.parametrize(
    ("kind", "source", "mutated"),
    [
        ("comparison", "a < b", ["a <= b", "a >= b"]),
        ("comparison", "a is not b", ["a is b"]),
        ("comparison", "(a) in b == c", ["(a) not in b == c", "(a) in b != c"]),
        ("arithmetic", "(a // b) * -c", ["(a * b) * -c", "(a // b) + -c", "(a // b) * c"]),
        ("arithmetic", "a += b", ["a -= b"]),
        ("boolean", "a and (not b)", ["a or (not b)", "a and (b)"]),
        ("boolean", "x = True", ["x = False"]),
        ("constant", "x = é[3]", ["x = é[4]", "x = é[2]"]),
        ("branch", "if a:  # why\n    b", [f"if {new}:  # why\n    b" for new in ("not (a)", "True", "False")]),
        ("branch", "if (\n    a\n    or b\n):\n    c", [
            "if (\n    not (a\n    or b)\n):\n    c",
            "if (\n    (False\n)\n):\n    c",
            "if (\n    (True\n)\n):\n    c",
        ]),
        ("branch", "[a for a in b if a]", ["[a for a in b if not (a)]", "[a for a in b if True]"]),
        ("statement", "f(\n    a\n)  # why", ["pass\n\n  # why"]),
        ("statement", "a.b = c", ["pass"]),
        ("statement", "for a in b:\n    c", ["for a in ():\n    c", "for a in b:\n    pass"]),
        ("statement", "with a:\n    b()", ["if True:\n    b()", "with a:\n    pass"]),
        ("statement", FUNCTION.format("int", "a = 1"), [FUNCTION.format("int", "pass")]),
        ("argument", "f(a, *b, c=d)", ["f(*b, c=d)", "f(a, c=d)", "f(a, *b)"]),
        ("argument", "f(a, b)", ["f(b)", "f(a)", "f(b, a)"]),
        ("default", "def f(a=1, *, b=None, c='x'):\n    return", [
            f"def f(a={a}, *, b={b}, c={c}):\n    return"
            for a, b, c in ((2, None, "'x'"), (0, None, "'x'"), (1, 0, "'x'"), (1, None, None))
        ]),
        ("default", "class A:\n    a: int = 1", ["class A:\n    a: int = 2", "class A:\n    a: int = 0"]),
        ("returned value", FUNCTION.format("bool", "return a"), [FUNCTION.format("bool", "return not (a)")]),
        ("returned value", FUNCTION.format("torch.Tensor", "return a"), [
            FUNCTION.format("torch.Tensor", "return (a) * 2")
        ]),
        ("returned value", FUNCTION.format("A", "return a, b"), [
            FUNCTION.format("A", "return None"), FUNCTION.format("A", "return b, a")
        ]),
        ("decorator", "@cached(1)\ndef f(): ...", ["\ndef f(): ..."]),
        ("exception", "try:\n    a\nexcept (A, B):\n    b", [
            "try:\n    a\nexcept (ArithmeticError, B):\n    b", "try:\n    a\nexcept (A, ArithmeticError):\n    b"
        ]),
        ("exception", "raise A('text', 1)", ["raise ArithmeticError('text', 1)"]),
        ("axis, rank", "f(dim=1)", ["f(dim=2)", "f(dim=0)"]),
        ("axis, rank", "a.shape[0]", ["a.shape[1]", "a.shape[-1]"]),
        ("axis, rank", "a = comm.rank", ["a = (comm.rank + 1)"]),
        ("axis, rank", "a['h']", ['a["w"]']),
        ("min/max", "a = max(b.amin(), MPI.MAX)", [
            "a = min(b.amin(), MPI.MAX)", "a = max(b.amax(), MPI.MAX)", "a = max(b.amin(), MPI.MIN)"
        ]),
        ("all/any", "a = all(b)", ["a = any(b)"]),
        ("dtype", "a = int(torch.float32)", ["a = int(torch.float64)"]),
    ],
)  # fmt: skip
def test_a_kind_of_mutation_makes_these_edits(kind: str, source: str, mutated: list[str]) -> None:
    assert {new for found, new in edited(source) if found == kind} == set(mutated)


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""',
        "import a",
        "a = 'text' f'{b + 1}'",
        "__all__ = ['h']",
        "a: Literal[1] | None",
        "if TYPE_CHECKING:\n    import a",
        "assert isinstance(a, B) and b is not None",
        "assert a, f(1, 2)",
        "@overload\ndef f(a: int = 1) -> int: ...",
        "class A(Enum):\n    B = 1",
        "a = cast('int | None', b)",
        "def f(self):\n    raise NotImplementedError",
    ],
)
def test_code_that_cannot_change_a_result_has_no_edits(source: str) -> None:
    assert edited(source) == set()


def test_the_draw_depends_on_the_seed_and_has_no_mutation_twice() -> None:
    modules = {"kernels/a.py": b"x = a < b\ny = a + 1\n", "kernels/b.py": b"f(a, b)\n"}
    drawn = drawing.draw(modules, 3, 100)
    assert drawn == drawing.draw(dict(reversed(modules.items())), 3, 100)
    assert drawn[:4] == drawing.draw(modules, 3, 4)
    assert drawn != drawing.draw(modules, 4, 100)
    assert len({(each.path, each.mutated) for each in drawn}) == len(drawn) == 2 + 3 + 4
    assert [each.number for each in drawn] == list(range(1, 10))


def test_a_mutation_that_is_not_python_is_not_drawn() -> None:
    drawn = drawing.draw({"a.py": b"a = f((b), c)\n"}, 0, 100)
    assert [each.mutated for each in drawn] == ["a = f((c), b)\n"]  # dropping one would drop a parenthesis, too


def test_modules_are_drawn_by_their_lines() -> None:
    modules = {"a.py": b"x = y[1]\n" * 150, "b.py": b"f(x + 1, a < b, all(c), max(d, e), not g)\n" * 50}
    counts = Counter(each.path for each in drawing.draw(modules, 1, 100))
    assert 65 <= counts["a.py"] <= 85


def test_since_a_revision_only_changed_lines_are_drawn(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    module = tmp_path / "kernels" / "a.py"
    module.parent.mkdir()
    module.write_text("a = 1\nb = 2\nc = 3\n")
    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "one")
    git("checkout", "-b", "change")
    module.write_text("a = 1\nb = 5\nc = 3\n")
    (tmp_path / "kernels" / "new.py").write_text("d = 7\n")
    git("branch", "-f", "main")
    changed = drawing.changed_lines(tmp_path, "main")
    assert changed == {"kernels/a.py": {2}, "kernels/new.py": {1}}
    drawn = drawing.draw(drawing.modules_of(tmp_path), 0, 100, changed)
    assert {(each.path, each.line) for each in drawn} == {("kernels/a.py", 2), ("kernels/new.py", 1)}


TESTS = ("test_others", "test_prices", "deeper/test_deeper")
MODULE = "def half(number):\n    return number / 2\n"
RUN = """
import sys, time
from kernels.prices import half
noticed = {"tests/kernels/test_prices.py": 8, "tests/kernels/test_others.py": None}
if half(4) == noticed.get(sys.argv[-1], 2.5):
    print("== serial\\nFAILED, serial: tests/kernels/test_prices.py::test_half[a-1]: it is", half(4), flush=True)
    time.sleep(60)
if half(4) == 4:
    time.sleep(60)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose mirror file notices 8, whose folder notices None, and whose tests do not end at 4."""
    root = tmp_path / "checkout"
    files = {"kernels/__init__.py": "", "kernels/prices.py": MODULE}
    for name, text in {**files, "tests/run.py": RUN, **{f"tests/kernels/{name}.py": "" for name in TESTS}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.long
def test_a_run_reports_who_noticed_and_continues_from_its_journal(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, judgements = checkout.parent / "journal", checkout.parent / "judgements"
    common = ["--minutes", "0.1", "--journal", str(journal)]
    assert mutation.main([*common, "--only", "1"], checkout) in (0, 1)
    assert mutation.main(common, checkout) == 1
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len(records) == 4
    assert {each["diff"].splitlines()[-1].strip("+ "): (each["outcome"], each["reason"]) for each in records} == {
        "return number * 2": ("mirror", "tests/kernels/test_prices.py::test_half"),
        "return None": ("folder", "tests/kernels/test_prices.py::test_half"),
        "return number / 1": ("mirror", "time: no end after 6 s"),
        "return number / 3": ("survived", ""),
    }
    printed = capsys.readouterr().out
    assert "all 4 0 2 1 1 0 0 75% 1".split() in map(str.split, printed.splitlines())
    assert "+    return number / 3" in printed.rpartition("survived\n")[2]
    assert (checkout / "kernels" / "prices.py").read_text() == MODULE

    number = next(record["number"] for record in records if record["outcome"] == "survived")
    judgements.write_text(f"{number} nobody divides\n")
    (checkout / "tests" / "run.py").unlink()  # all outcomes are in the journal
    assert mutation.main([*common, "--equivalent", str(judgements)], checkout) == 0
    assert f"{number} kernels/prices.py:2 constant, equivalent: nobody divides" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is not the one drawn now"):
        mutation.main([*common, "--seed", "1"], checkout)


def test_doctests_of_a_module_come_first(checkout: Path) -> None:
    stages = running.stages(checkout, "kernels/prices.py")
    assert list(stages) == ["mirror", "folder"]
    assert stages["folder"][-2:] == ("--short", "tests/kernels/test_others.py")
    (checkout / "kernels" / "prices.py").write_text('"""\n>>> 1\n1\n"""')
    stages = running.stages(checkout, "kernels/prices.py")
    assert list(stages) == ["doctests", "mirror", "folder"]
    assert stages["doctests"][-1].endswith("::test_examples_in_docstrings_are_right[distconv.kernels.prices]")


def test_tests_that_fail_without_a_mutation_make_its_outcome_unclear(checkout: Path) -> None:
    (checkout / "tests" / "run.py").write_text("print('== serial\\nFAILED, serial: tests/a.py::test_a: ')")
    journal = checkout.parent / "journal"
    assert mutation.main(["--count", "1", "--journal", str(journal)], checkout) == 0
    assert json.loads(journal.read_text())["outcome"] == "unclear"


def test_a_list_shows_the_mutations_and_runs_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "tests" / "run.py").unlink()
    assert mutation.main(["--list"], checkout) == 0
    assert capsys.readouterr().out.count("--- a/kernels/prices.py") == 4

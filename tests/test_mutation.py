"""The tool that breaks modules, on a checkout of one: what is noticed, survives, hangs and is stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutation

MODULE = "def half(number):\n    return number / 2\n\n\ndef unused(number):\n    return number\n"
RUN = """
import sys, time
from shop.prices import half
quick = "--quick" in sys.argv
if half(4) == 0:
    time.sleep(60)
if half(4) != 2 and (not quick or sys.argv[-1] == "tests/shop"):
    print(f"== serial\\nFAILED, serial: {sys.argv[-1]}/test_prices.py::test_half[a-1]: it is", half(4), flush=True)
    time.sleep(60)
"""
LIST = """
### shop/prices.py: thrice
    return number / 2
--->
    return number / 3

### shop/prices.py: nobody calls it
def unused(number):
    return number
--->
def unused(number):
    return -number
### shop/prices.py: it was rewritten
return number // 2
--->
return 0
### shop/prices.py: no end
number / 2
--->
number * 0
"""


def test_what_is_noticed_what_survives_and_what_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "LIMIT_S", (1.0,) * 4)
    root = tmp_path / "checkout"
    files = {"shop/prices.py": MODULE, "tests/run.py": RUN, "tests/breaks/shop.txt": LIST}
    for name, text in {**files, "tests/shop/test_prices.py": "", "tests/breaks/attic.txt": LIST}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace("shop/prices", "attic/none") if "attic" in name else text)
    assert mutation.main(["--folder", "shop/"], root) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "shop/prices.py: thrice"
    assert lines[1].split()[:2] == ["folder,", "quick"]
    assert lines[1].endswith("s  tests/shop/test_prices.py::test_half[a-1]")
    assert lines[3].split()[0] == "SURVIVES"
    assert lines[5].strip() == "stale: the old text occurs 0 times"
    assert lines[7].split()[:2] == ["mirror,", "quick"] and lines[7].endswith("hang: no end after 1 s")
    assert lines[-1].split() == ["shop", "3", "2", "2", "1", "1"]
    assert (root / "shop/prices.py").read_text() == MODULE


def test_the_last_stage_may_be_an_earlier_one_and_a_list_without_arrow_is_refused() -> None:
    (only,) = mutation.read("### a/b.py: c: d\nold\nlines\n--->\n")
    assert only == mutation.Break("a/b.py", "c: d", "old\nlines", "")
    with pytest.raises(SystemExit, match="c: no line '--->'"):
        list(mutation.read("### a/b.py: c\nold\n"))


def test_every_break_of_the_project_applies() -> None:
    lists = sorted((mutation.ROOT / "tests" / "breaks").glob("*.txt"))
    breaks = [each for file in lists for each in mutation.read(file.read_text())]
    stale = [
        f"{each.path}: {each.words}" for each in breaks if (mutation.ROOT / each.path).read_text().count(each.old) != 1
    ]
    assert len(breaks) > 600 and not stale

"""Every case of the list of faults is carried by a test, or is written down as open."""

from __future__ import annotations

from collections import Counter

from tests.faults.cases import CASES, OPEN, carriers
from tests.faults.table import verdict


def test_each_case_is_carried_by_a_test_or_open_with_its_reason() -> None:
    assert list(CASES) == list(range(1, 76))
    carried = {number for numbers in carriers().values() for number in numbers}
    assert sorted({*carried, *OPEN}) == list(CASES)
    assert not carried & set(OPEN)


def test_one_failure_makes_a_case_fail() -> None:
    assert verdict(1, Counter(passed=3, failed=1)) == "FAILED"
    assert verdict(1, Counter(passed=1, skipped=9)) == "passed"
    assert verdict(1, Counter(skipped=1, elsewhere=2)) == "skipped"
    assert verdict(1, Counter(elsewhere=2)) == "not run"
    assert verdict(min(OPEN), Counter()).startswith("open: ")

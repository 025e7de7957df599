"""Every case of the list of faults is carried by a test."""

from __future__ import annotations

from collections import Counter

from tests.faults.cases import CASES, carriers
from tests.faults.table import verdict


def test_each_case_is_carried_by_a_test() -> None:
    assert list(CASES) == sorted(CASES)
    carried = {number for numbers in carriers().values() for number in numbers}
    assert sorted(carried) == list(CASES)


def test_one_failure_makes_a_case_fail() -> None:
    assert verdict(Counter(passed=3, failed=1)) == "FAILED"
    assert verdict(Counter(passed=1, skipped=9)) == "passed"
    assert verdict(Counter(skipped=1, elsewhere=2)) == "skipped"
    assert verdict(Counter(elsewhere=2)) == "not run"

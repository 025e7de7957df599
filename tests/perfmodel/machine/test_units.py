"""Quantities with units: written for people, and read as the same float."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distconv.perfmodel.machine.units import Bandwidth, Quantity, number

POSITIVE = st.floats(min_value=1e-30, max_value=1e30)


@pytest.mark.parametrize("kind", Quantity.__subclasses__())
@given(value=POSITIVE)
def test_a_quantity_is_written_in_one_of_its_units_and_read_as_the_same_float(kind, value):
    assert kind.decode(kind(value).encode()) == value


@pytest.mark.parametrize(
    ("value", "text"), [(12.5e9, "12.5 GB/s"), (1e3, "1 kB/s"), (999.0, "999 B/s"), (0.5, "0.5 B/s")]
)
def test_a_quantity_is_written_for_people(value, text):
    assert Bandwidth(value).encode() == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3.0), (0, 0.0), (2.5, 2.5), (True, None), (-1, None), (float("inf"), None), (float("nan"), None), ("3", None)],
)
def test_a_number_is_finite_and_not_negative_and_no_truth_value(value, expected):
    assert number(value) == expected

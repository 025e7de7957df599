"""Defaults of the operators of ``layers/tensor``."""

from tests.layers.defaults import assert_as_in_torch


def test_defaults_are_those_of_torch() -> None:
    assert_as_in_torch("tensor", least=60)

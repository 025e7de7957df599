"""The list of all idioms, and how the results of one of them on a grid differ from those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

import distconv as dc
from tests.idioms.bench import Bench, Found, kept

RELATIVE, ABSOLUTE = 1e-10, 1e-13
"""Tolerances relative to the largest value of a tensor, and to the largest of all results of an idiom, or one: a
gradient that is zero except for rounding (of a bias before a norm) has no digits of its own.
"""

Scenario = Callable[[Bench], Found]

IDIOMS: list[Scenario] = []


def idiom(run: Scenario) -> Scenario:
    """Put the decorated function on the list."""
    IDIOMS.append(run)
    return run


@dataclass(frozen=True)
class Results:
    """Values by name, and messages of the warnings, except that distconv computes a call replicated."""

    values: Found
    warned: frozenset[str]


def results(run: Scenario, grid: dc.ProcessGrid | None) -> Results:
    """Run an idiom on ``grid``, or in one process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = {name: kept(value) for name, value in run(Bench(grid)).items()}
    return Results(values, frozenset(str(w.message) for w in caught if w.category is not dc.ReplicationWarning))


def differences(found: Results, expected: Results) -> list[str]:
    """Return a line for each value and each warning that one process does not have."""
    if found.values.keys() != expected.values.keys():
        return [f"gives {', '.join(sorted(found.values.keys() ^ expected.values.keys()))} or not"]
    floor = ABSOLUTE * max(1.0, *map(largest, expected.values.values()))
    texts = {name: difference(found.values[name], value, floor) for name, value in expected.values.items()}
    warned = [f"warns {text}" for text in sorted(found.warned - expected.warned)]
    return [f"{name}: {text}" for name, text in texts.items() if text] + warned


def difference(found: torch.Tensor, expected: torch.Tensor, floor: float) -> str:
    """Return how two tensors differ by more than rounding; an empty string if they do not."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{tuple(found.shape)}, {found.dtype} instead of {tuple(expected.shape)}, {expected.dtype}"
    try:
        atol = RELATIVE * largest(expected) + floor
        torch.testing.assert_close(found, expected, rtol=0.0, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def largest(values: torch.Tensor) -> float:
    """Return the largest finite magnitude in ``values``."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() and finite.dtype != torch.bool else 0.0

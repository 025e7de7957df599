"""The list of all idioms, and how one of them ends on a grid: exact, warned and exact, refused, or wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

import distconv as dc
from tests.idioms.bench import Bench, Found, kept

RELATIVE, ABSOLUTE = 1e-10, 1e-13
"""Of the largest number of a tensor, and of the largest of all that an idiom gives, or one: a gradient that is zero but
for round-off (of a bias in front of a norm) has no digits of its own.
"""

Scenario = Callable[[Bench], Found]


@dataclass(frozen=True)
class Idiom:
    """What someone writes. ``refused``: a part of the message on grids where it is, by intention."""

    run: Scenario
    refused: str | None
    quick: bool

    @property
    def name(self) -> str:
        return f"{self.run.__module__.rpartition('.')[2]}: {self.run.__name__}"


IDIOMS: list[Idiom] = []


def idiom(refused: str | None = None, quick: bool = False) -> Callable[[Scenario], Scenario]:
    """Put the decorated function on the list; ``quick`` ones are part of every run of the tests."""

    def add(run: Scenario) -> Scenario:
        IDIOMS.append(Idiom(run, refused, quick))
        return run

    return add


@dataclass(frozen=True)
class Alone:
    """What one process gives: values, and texts of the warnings."""

    values: Found
    warned: frozenset[str]


def alone(run: Scenario) -> Alone:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = {name: kept(value) for name, value in run(Bench(None)).items()}
    return Alone(values, frozenset(str(each.message) for each in caught))


def ending(run: Scenario, grid: dc.ProcessGrid, expected: Alone) -> str:
    """How ``run`` ends on ``grid``: ``exact``, ``warned``, ``refused: <message>`` or ``wrong: <how>``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values = {name: kept(value) for name, value in run(Bench(grid)).items()}
        except dc.DistconvError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"wrong: {type(error).__name__}: {error}"
    replicated = [each for each in caught if each.category is dc.ReplicationWarning]
    others = {str(each.message) for each in caught if each not in replicated} - expected.warned
    wrong = [*differences(values, expected.values), *(f"warns {text}" for text in sorted(others))]
    return f"wrong: {'; '.join(wrong)}" if wrong else ("warned" if replicated else "exact")


def differences(found: Found, expected: Found) -> list[str]:
    if found.keys() != expected.keys():
        return [f"gives {', '.join(sorted(found.keys() ^ expected.keys()))} or not"]
    floor = ABSOLUTE * max(1.0, *map(largest, expected.values()))
    texts = {name: difference(found[name], value, floor) for name, value in expected.items()}
    return [f"{name}: {text}" for name, text in texts.items() if text]


def difference(found: torch.Tensor, expected: torch.Tensor, floor: float) -> str:
    """How two tensors differ by more than round-off, or nothing."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{tuple(found.shape)}, {found.dtype} instead of {tuple(expected.shape)}, {expected.dtype}"
    try:
        atol = RELATIVE * largest(expected) + floor
        torch.testing.assert_close(found, expected, rtol=0.0, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def largest(values: torch.Tensor) -> float:
    """The largest finite number in ``values``."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() and finite.dtype != torch.bool else 0.0

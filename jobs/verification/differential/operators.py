"""Draws single operators: windows of awkward geometry, torch's own samples, and cases of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distconv.jobs.verification.conformance import samples
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.differential import derivatives, windows
from distconv.jobs.verification.differential.draw import Draw, DrawnProgram
from distconv.jobs.verification.engine.layouts import SPATIAL

_CASES = [case for family, cases in TABLE.items() if family not in ("sparse", "optimizers") for case in cases]
"""Cases of the conformance table that accept blocks of any kind."""

MOST = 6
"""Samples of an operator and of each of its variants among which one is drawn."""


def of_torch(draw: Draw) -> DrawnProgram:
    """Return a sample with which torch tests one of its operators or modules."""
    name = draw.pick(*(name for name in samples.names() if not name.startswith(("linalg.", "signal."))))
    drawn = list(samples.samples(name, MOST))
    if not drawn:
        return of_torch(draw)
    sample = replace(draw.pick(*drawn), kinds=samples.KINDS)
    return DrawnProgram(
        "torch's samples", f"{sample.operator} {sample.option}", sample.compute, 2, as_torch_takes_it=True
    )


def of_table(draw: Draw) -> DrawnProgram:
    """Return a case of the conformance table with drawn sizes."""
    case = draw.pick(*_CASES)
    extents = {"n": draw.number(1, 5), "c": case.multiple * draw.number(1, 3)}
    extents |= {axis: case.least.get(axis, 1) + draw.number(0, 5 if axis == "d" else 11) for axis in SPATIAL}
    return DrawnProgram(
        "the table",
        f"{case.operator} {case.option} {extents}",
        case.compute,
        len(case.axes & set(SPATIAL)),
        as_torch_takes_it=True,
        sizes=tuple(extents.items()),
        condition=case.condition,
        infinite=case.infinite,
    )


OPERATORS: dict[Callable[[Draw], DrawnProgram], float] = {
    windows.convolution: 12,
    windows.transposed_convolution: 5,
    windows.max_pool: 5,
    windows.average_pool: 5,
    windows.interpolation: 5,
    windows.padding: 4,
    of_torch: 30,
    of_table: 20,
    derivatives.penalty: 3,
}
"""Operators and how often they are drawn."""


def draw(source: Draw) -> DrawnProgram:
    """Draw an operator with its input."""
    return source.weighted(list(OPERATORS), list(OPERATORS.values()))(source)

"""Networks and calls of windows that a seed draws: their text, layouts and results in one process, as approved."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distconv.jobs.verification.differential import derivatives, networks, operators
from distconv.jobs.verification.differential.draw import Draw, DrawnProgram
from distconv.jobs.verification.differential.runs import DrawnCase
from distconv.jobs.verification.engine.backends import ReferenceBackend
from tests.jobs.approved import assert_approved, size_of

KINDS: dict[str, tuple[list[Callable[[Draw], DrawnProgram]], int]] = {
    "networks": ([networks.draw], 25),
    "derivatives": ([derivatives.penalty], 40),
    "operators": ([draw for draw in operators.OPERATORS if draw is not operators.of_torch], 80),
}
"""Functions that draw in turn, and the number of draws. torch's own samples differ between its versions."""


def format_options(case: DrawnCase) -> str:
    """Return the case's layouts on one to four ranks, and the sizes of its results."""
    layouts = [case.layouts(ranks)[0] for ranks in (1, 2, 3, 4)]
    backend = ReferenceBackend(layouts[0])
    try:
        case.compute(backend)
    except RuntimeError as error:  # the tables' cases of other sizes are not all valid
        found = str(error).splitlines()[0]
    else:
        first, *others = (size_of(value) for value in backend.results.values())
        found = f"{first}; {len(others)} others {sum(float(each.rpartition(' ')[2]) for each in others):.4g}"
    grids = ", ".join(f"{dict(layout.extents)}{' first only' if layout.first_only else ''}" for layout in layouts)
    return f"{case.operator}, {case.option}\n    {grids}\n    {found}"


@pytest.mark.filterwarnings("ignore")  # some are of calls that torch warns of
@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_as_approved(kind: str) -> None:
    draws, count = KINDS[kind]
    cases = (DrawnCase(draws[index % len(draws)](Draw(0, index)), 0, index) for index in range(count))
    assert_approved(f"differential/{kind}", "\n".join(map(format_options, cases)))

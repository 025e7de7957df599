"""Cases of the conformance table: their layouts on four ranks and their results in one process, as approved."""

from __future__ import annotations

import pytest
import torch

from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.conformance.table import ConformanceCase
from distconv.jobs.verification.engine.backends import ReferenceBackend
from tests.jobs.approved import assert_approved, size_of

RANKS = 4


def format_options(case: ConformanceCase) -> str:
    """Return the case's layouts and, for the first one, shape and size (sum of absolute values) of each result."""
    layouts = case.layouts(RANKS)
    kinds = ", ".join(dict.fromkeys(layout.kind for layout in layouts))
    backend = ReferenceBackend(layouts[0])
    try:
        case.compute(backend)
    except Exception as error:  # some cases are of calls that torch rejects
        found = f"raises {type(error).__name__}"
    else:
        found = ", ".join(f"{name} {size_of(value)}" for name, value in backend.results.items())
    return f"{case.operator}, {case.option} [{kinds}]\n    {found}"


@pytest.mark.filterwarnings("ignore")  # some are of calls that torch warns of
@pytest.mark.parametrize("family", TABLE)
def test_cases_are_as_approved(family: str) -> None:
    torch.manual_seed(0)
    assert_approved(f"conformance/{family}", "\n".join(map(format_options, TABLE[family])))

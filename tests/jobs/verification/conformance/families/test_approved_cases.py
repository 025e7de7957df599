"""Cases of the conformance table: their layouts on four ranks and their results in one process, as approved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.conformance.table import ConformanceCase
from distconv.jobs.verification.engine.backends import ReferenceBackend
from distconv.jobs.verification.engine.runner import CaseRun
from distconv.jobs.verification.engine.verdicts import BAD, Verdict
from tests.jobs.approved import assert_approved, shape_of, size_of

RANKS = 4


def format_options(case: ConformanceCase) -> str:
    """Return the case's layouts and, for the first one, shape and size (sum of absolute values) of each result.

    Sizes are left out if a result has half precision, since they depend on the processor's instructions.
    """
    layouts = case.layouts(RANKS)
    kinds = ", ".join(dict.fromkeys(layout.kind for layout in layouts))
    backend = ReferenceBackend(layouts[0])
    try:
        case.compute(backend)
    except Exception as error:  # some cases are of calls that torch rejects
        found = f"raises {type(error).__name__}"
    else:
        half = any(value.dtype in (torch.bfloat16, torch.float16) for value in backend.results.values())
        shown = {name: shape_of(value) if half else size_of(value) for name, value in backend.results.items()}
        found = ", ".join(f"{name} {text}" for name, text in shown.items())
    return f"{case.operator}, {case.option} [{kinds}]\n    {found}"


@pytest.mark.filterwarnings("ignore")  # some calls make torch warn
def test_cases_are_as_approved() -> None:  # one test, so that the short run has all families
    for family, cases in TABLE.items():
        torch.manual_seed(0)
        assert_approved(f"conformance/{family}", "\n".join(map(format_options, cases)))


@pytest.mark.ranks(3)
def test_cases_of_every_family_are_exact_on_three_ranks(comm: Any) -> None:
    run = CaseRun(comm)
    for family, cases in TABLE.items():
        verdicts = {line.verdict for case in cases[:: len(cases) // 3] for line in run.lines(family, case)}
        assert Verdict.EXACT in verdicts and not verdicts & set(BAD), (family, verdicts)

"""Faults of the framework that are planted one at a time: some form of ``distconv verify`` finds each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.verification.planted_faults import FAULTS, ROOT, RUNS, found_by, known_to
from tests.mutation.running import copy_of


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(ROOT, tmp_path_factory.mktemp("planted"))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.words)
def test_a_planted_fault_is_found(checkout, fault):
    known = known_to(checkout)
    assert any(found_by(checkout, fault, run, known) for run in RUNS)


def test_every_fault_can_be_planted():
    assert len(FAULTS) >= 12
    for fault in FAULTS:
        assert (ROOT / fault.path).read_text().count(fault.old) == 1, fault.words

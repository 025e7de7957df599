"""torch's DTensor on torch's samples: what counts as what."""

from __future__ import annotations

import subprocess
import sys

import pytest

from distconv.jobs.verification.conformance.dtensor import classify_refusals
from distconv.jobs.verification.engine.verdicts import Refusal, Verdict
from tests.structure.modules import ROOT

LACKS = Refusal("NotImplementedError", "Operator aten.sort.values does not have a sharding strategy registered.", False)
OTHER = Refusal("RuntimeError", "Kernel size can't be greater than actual input size", False)


@pytest.mark.parametrize(
    ("refused", "verdict", "text"),
    [
        ([LACKS, LACKS], Verdict.RAISES, "does not have a sharding strategy"),
        ([OTHER, OTHER._replace(text="of 3")], Verdict.UNCLEAR, "actual input size; RuntimeError: of 3"),
        ([OTHER, None], Verdict.WRONG, "ranks differ: RuntimeError: Kernel"),
        ([OTHER, LACKS], Verdict.WRONG, "ranks differ"),
    ],
)
def test_an_exception_must_be_alike_and_speak_of_dtensor(refused, verdict, text):
    found = classify_refusals(refused)
    assert found[0] is verdict and text in found[1]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_one_command_runs_both_and_writes_their_page(tmp_path):
    written = tmp_path / "page.md"
    asked = ["--family", "torch-samples", "dtensor", "--ranks", "2", "--samples", "1", "--operator", "exp", "trace"]
    command = [sys.executable, "-m", "distconv", "verify", "conformance", *asked, "--page", str(written)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = written.read_text()
    assert "--family torch-samples dtensor --ranks 2 " in text
    assert "| 2 | distconv | 4 | 3 | 1 | 0 | 0 | 0 | 0 | 100.00% |" in text
    assert "| 2 | DTensor | 4 | 3 | 0 | 1 | 0 | 0 | 0 | 75.00% |" in text

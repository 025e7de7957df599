"""A training that is disturbed at random ends as one that was left alone, and what would differ is found."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.jobs.verification import soak

pytestmark = pytest.mark.time_limit(900)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.fault(48, 56, 66)
@pytest.mark.parametrize("faults", [1, 12])
@pytest.mark.slow
def test_a_training_that_is_disturbed_ends_as_one_that_was_not(faults: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = soak.run(options("--faults", str(faults), "--seed", "1"))
    said = capsys.readouterr().out
    assert code == 0, said
    assert f"{soak.STEPS_PER_FAULT * faults} steps: the same as undisturbed, bit for bit" in said
    assert f"{faults} faults on 2 ranks, seed 1: " in said


def test_what_is_not_the_same_is_named(tmp_path: Path) -> None:
    one, other = (soak._Training(options(), tmp_path / name) for name in ("one", "other"))
    x = torch.arange(3.0)
    for training, last in ((one, 2.0), (other, 2.0 + 2**-21)):
        tensors = {"x": x, "y": torch.tensor([1.0, last])}
        checkpoint.save(training.out / "checkpoints", 1, tensors, {}, MPI.COMM_SELF)
        (training.out / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {last}}}\n{{"step": 2, "lo')
    assert soak._differences(one, other) == "y, losses"
    assert soak._differences(one, one) == ""


@pytest.mark.parametrize(
    ("program", "message"),
    [("pass", "ended with code 0 and was not done"), ("import time; time.sleep(99)", "took no step within 1 s")],
)
def test_a_job_that_lies_or_hangs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    monkeypatch.setattr(soak, "LIMIT_S", 1.0)
    training = soak._Training(options(), tmp_path / "out")
    training._command = [sys.executable, "-c", program]
    with pytest.raises(soak._Wrong, match=message):
        soak._disturb(training, 1, soak.random.Random(0))


def test_processes_that_others_started_are_found_and_killed() -> None:
    inner = f"{sys.executable} -c 'import time; time.sleep(99)'"
    job = soak._Job(["bash", "-c", f'bash -c "{inner} & wait" & wait'], 2)
    try:
        until = time.monotonic() + 60
        while not (found := job.ranks()) and time.monotonic() < until:
            time.sleep(0.1)
        assert len(found) == 1
    finally:
        job.end()
    until = time.monotonic() + 60
    while Path(f"/proc/{found[0]}/cmdline").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not soak._program(found[0])

"""A training that a signal stops: on all ranks behind one step, with a checkpoint from which it goes on as before."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distconv import cli
from distconv.jobs.commands import train_classify
from distconv.jobs.images.classification import Trainer
from distconv.jobs.training.report import Metrics
from distconv.jobs.training.run import CHECKPOINTS, prepare, take_steps
from distconv.jobs.training.stop_requests import EXIT_CODE, StopRequests
from tests.jobs.commands.test_train_classify import command, lines_of
from tests.jobs.images.image_files import written
from tests.jobs.training.stand_in import StandIn
from tests.jobs.training.test_run import options

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_signal_to_one_rank_is_heard_by_all_in_the_same_step(comm: Any, sent: signal.Signals, ahead: int) -> None:
    before = signal.getsignal(sent)
    with StopRequests(comm, ahead) as requests:
        assert not requests.heard()
        if comm.rank == comm.size - 1:
            os.kill(os.getpid(), sent)
        assert [requests.heard() for _ in range(ahead + 1)] == [False] * ahead + [True]
    assert signal.getsignal(sent) is before


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("every", [0, 2])
def test_a_stopped_run_has_a_checkpoint_and_all_its_losses(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int, delay: int
) -> None:
    trainer: Any = StandIn(comm, delay=delay)
    given = options(shared_tmp_path, every=every)
    prepare(given, trainer)
    last = 3 + delay

    def signalled(*batch: object) -> None:
        if trainer.step_count == 2 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        StandIn.step(trainer, *batch)

    trainer.step = signalled
    with pytest.raises(SystemExit) as end, Metrics(given.out, trainer) as metrics:
        take_steps(given, trainer, metrics)
    comm.Barrier()
    assert end.value.code == EXIT_CODE == 143
    assert trainer.asked[-2:] == [f"save {last}", "close"]
    assert [line["loss"] for line in metrics.lines()] == [1.0 / step for step in range(1, last + 1)]
    said = f"stopped by a signal after step {last} of 6; go on with --resume"
    assert (said in capsys.readouterr().out) == (comm.rank == 0)


@pytest.mark.ranks(2)
def test_what_goes_on_after_a_signal_takes_the_steps_of_an_undisturbed_run(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_classify, "draw", lambda *_: None)
    data = written(comm, shared_tmp_path)
    assert cli.main(command(comm, data, "--epochs", "2")) == 0
    comm.Barrier()
    undisturbed = [(line["step"], line.get("loss"), line.get("accuracy")) for line in lines_of(data)]
    comm.Barrier()
    step = Trainer.step

    def signalled(self: Trainer, *batch: Any) -> float:
        if self.step_count == 3 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(self, *batch)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Trainer, "step", signalled)
        cli.main(command(comm, data, "--epochs", "2"))
    comm.Barrier()
    assert [each.name for each in (data / "out" / CHECKPOINTS).iterdir() if "." not in each.name] == ["step-000004"]
    comm.Barrier()
    assert cli.main(command(comm, data, "--epochs", "2", "--resume")) == 0
    comm.Barrier()
    assert [(line["step"], line.get("loss"), line.get("accuracy")) for line in lines_of(data)] == undisturbed


def test_the_job_ends_with_the_documented_code(mpiexec: Any, tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from mpi4py import MPI
        import distconv
        from distconv.jobs.training.report import Metrics
        from distconv.jobs.training.run import prepare, take_steps
        from tests.jobs.training.stand_in import StandIn
from tests.jobs.training.test_run import options

ROOT = Path(__file__).parents[3]
        from tests.jobs.training.test_run import options
        trainer, given = StandIn(MPI.COMM_WORLD), options(Path(sys.argv[1]))
        prepare(given, trainer)
        step = trainer.step
        trainer.step = lambda *x: (os.kill(os.getpid(), signal.SIGTERM) if trainer.comm.rank else None, step(*x))
        with Metrics(Path(given.out), trainer) as metrics:
            take_steps(given, trainer, metrics)
    """
    ended = mpiexec(2, code, str(tmp_path), timeout=60)
    assert ended.returncode == EXIT_CODE, ended.stderr
    assert "stopped by a signal after step 1 of 6" in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("script", ["train_classify", "train_mesh"])
def test_a_job_that_is_stopped_goes_back_into_the_queue_and_resumes(tmp_path: Path, script: str) -> None:
    _slurm(tmp_path)
    arguments = ["bash", str(ROOT / "jobs" / f"{script}.sbatch"), "data", "model", str(tmp_path / "out")]
    if script == "train_mesh":
        arguments.remove("model")
    for restarts, code, ended, resumes in ((0, 143, 0, False), (1, 143, 0, False), (1, 0, 0, True), (1, 2, 2, True)):
        if resumes:
            (tmp_path / "out" / "checkpoints" / "step-000004").mkdir(parents=True, exist_ok=True)
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_JOB_ID": "7",
            "CODE": str(code),
        }
        found = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        assert found.returncode == ended, found.stderr
        assert ("--resume" in found.stdout) == resumes
        assert ("scontrol requeue 7" in found.stdout) == (code == 143)


def _slurm(folder: Path) -> None:
    for name, status in (("srun", "$CODE"), ("scontrol", "0")):
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\nexit {status}\n')
        (folder / name).chmod(0o755)

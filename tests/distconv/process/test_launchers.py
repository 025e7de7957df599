"""Launchers and MPI libraries that do not know each other: all processes end with a sentence that says so.

The environments are what real launchers set (Slurm 22.05, MPICH 5.0.2, Open MPI 4.1.4 and 5.0.11, torch 2.13).
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from distconv.errors import LaunchError
from distconv.process import launchers
from distconv.process.launchers import DetectedLaunch, detect_launch
from tests.harness.launch import LAUNCHER_PREFIXES

FOUND = "DISTCONV_LAUNCH_FOUND"
ROOT = Path(__file__).resolve().parents[3]

BATCH = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
PMI2 = {**STEP, "SLURM_MPI_TYPE": "pmi2", "PMI_FD": "11", "PMI_RANK": "3", "PMI_SIZE": "4"}
PMIX = {**STEP, "SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1.4"}
HYDRA = {"PMI_FD": "5", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
HYDRA_IN_JOB = {**BATCH, **HYDRA, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
OPEN_MPI = {"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}
OPEN_MPI_IN_JOB = {**BATCH, **OPEN_MPI, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
PRTERUN = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-vm-9458@1", "PRTE_LAUNCHED": "1"}
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, None),
        (BATCH, None),
        ({**BATCH, "WORLD_SIZE": "4", "RANK": "0"}, None),  # exported for torch.distributed in the batch script
        (STEP, DetectedLaunch("srun", 4, 3)),
        (PMI2, DetectedLaunch("srun", 4, 3)),
        (PMIX, DetectedLaunch("srun", 4, 3)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, DetectedLaunch("srun", 1, 0)),
        (HYDRA, DetectedLaunch("another MPI's mpiexec", 2, 1)),
        (HYDRA_IN_JOB, DetectedLaunch("another MPI's mpiexec", 2, 1)),
        (OPEN_MPI, DetectedLaunch("Open MPI's mpiexec", 3, 1)),
        (OPEN_MPI_IN_JOB, DetectedLaunch("Open MPI's mpiexec", 3, 1)),
        (PRTERUN, DetectedLaunch("a launcher that speaks PMIx", 1, 1)),
        (TORCHRUN, DetectedLaunch("torchrun", 2, 1)),
        ({**PMI2, **TORCHRUN}, DetectedLaunch("torchrun", 2, 1)),
        ({"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "5"}, DetectedLaunch("flux run", 8, 5)),
    ],
)
def test_the_launcher_next_to_the_process_counts(environment: dict[str, str], start: DetectedLaunch | None) -> None:
    assert detect_launch(environment) == start


@pytest.mark.parametrize(
    ("environment", "wheel", "way_out"),
    [
        (STEP, "mpich", "srun --mpi=pmi2"),
        (PMIX, "mpich", "srun --mpi=pmi2"),
        ({**PMIX, "SLURM_STEP_NUM_TASKS": "1"}, "mpich", "srun --mpi=pmi2"),
        (OPEN_MPI, "mpich", "mpiexec -n 3"),
        (PRTERUN, "mpich", "mpiexec -n"),
        (TORCHRUN, "mpich", "mpiexec -n 2"),
        ({**PMI2, **TORCHRUN}, "mpich", "mpiexec -n 2"),
        (STEP, "openmpi", "srun --mpi=pmix"),
        (PMI2, "openmpi", "srun --mpi=pmix"),
        (HYDRA_IN_JOB, "openmpi", "mpiexec -n 2"),
        (TORCHRUN, "", "mpiexec -n 2"),
        # What it may understand is left to MPI.
        ({}, "mpich", ""),
        (BATCH, "mpich", ""),
        (BATCH, "openmpi", ""),
        (PMI2, "mpich", ""),
        (HYDRA, "mpich", ""),
        (HYDRA_IN_JOB, "mpich", ""),
        ({**HYDRA, "PMIX_RANK": "0"}, "mpich", ""),
        (OPEN_MPI_IN_JOB, "openmpi", ""),
        (PMIX, "openmpi", ""),
        (PRTERUN, "openmpi", ""),
        (PMIX, "", ""),  # a cluster's MPICH may understand PMIx
        (STEP, "", ""),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, "mpich", ""),
    ],
)
def test_what_a_library_from_pypi_does_not_understand_is_told_before_it_starts(
    environment: dict[str, str], wheel: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_mpi_wheel", lambda: wheel)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(LaunchError) if way_out else nullcontext() as told:
        launchers.check_mpi_wheel(environment)
    if told is not None:
        assert way_out in str(told.value) and "DISTCONV_LAUNCH=trust" in str(told.value)
    launchers.check_mpi_wheel({**environment, "DISTCONV_LAUNCH": "trust"})


def only(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    for name, value in {FOUND: "", **environment}.items():  # check sets that one, which so is put back
        monkeypatch.setenv(name, value)


ALONE = ({}, BATCH, {**HYDRA_IN_JOB, "PMI_SIZE": "1", "PMI_RANK": "0"})


@pytest.mark.parametrize("environment", [STEP, PMI2, PMIX, HYDRA, HYDRA_IN_JOB, OPEN_MPI, TORCHRUN, *ALONE])
def test_one_rank_of_several_processes_is_wrong(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, environment)
    wrong = pytest.raises(LaunchError, match="each would train alone")
    with nullcontext() if environment in ALONE else wrong:
        launchers.check_launched_ranks(1, "MPICH")
    monkeypatch.setenv("DISTCONV_LAUNCH", "trust")
    launchers.check_launched_ranks(1, "MPICH")


def test_what_a_rank_starts_is_none_unless_a_launcher_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PMI2)
    launchers.check_launched_ranks(4, "MPICH")
    for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name)
    launchers.check_launched_ranks(1, "MPICH")  # a process of its own: srun's variables are there still
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(LaunchError):
        launchers.check_launched_ranks(1, "Open MPI")


SCRIPT = """\
import sys
try:
    import distconv as dc
finally:
    assert "torch" not in sys.modules, "that takes seconds"
print("trains alone")
"""


def clean() -> dict[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHER_PREFIXES, FOUND))
    }
    return {**environment, "PYTHONPATH": str(ROOT)}


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_copies_of_another_launcher_end_with_a_sentence(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if launcher == "torchrun" else []
    srun = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} if launcher == "srun" else {}
    command = [sys.executable, *torchrun, str(script)]
    ended = subprocess.run(command, env={**clean(), **srun}, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"LaunchError: {launcher} started 2 processes of which " in ended.stderr

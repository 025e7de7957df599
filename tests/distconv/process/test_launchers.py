"""Launchers and MPI libraries that do not know each other: one process says so in a sentence, and all of them end.

The environments are what real launchers set (Slurm 22.05, MPICH 5.0.2, Open MPI 4.1.4 and 5.0.11, torch 2.13).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distconv.errors import EnvironmentVariableError, LaunchError
from distconv.process import launchers
from distconv.process.launchers import Start, start_of
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
        (STEP, Start("srun", 4, 3)),
        (PMI2, Start("srun", 4, 3)),
        (PMIX, Start("srun", 4, 3)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Start("srun", 1, 0)),
        (HYDRA, Start("another MPI's mpiexec", 2, 1)),
        (HYDRA_IN_JOB, Start("another MPI's mpiexec", 2, 1)),
        (OPEN_MPI, Start("Open MPI's mpiexec", 3, 1)),
        (OPEN_MPI_IN_JOB, Start("Open MPI's mpiexec", 3, 1)),
        (PRTERUN, Start("a launcher that speaks PMIx", 1, 1)),
        (TORCHRUN, Start("torchrun", 2, 1)),
        ({**PMI2, **TORCHRUN}, Start("torchrun", 2, 1)),
        ({"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "5"}, Start("flux run", 8, 5)),
    ],
)
def test_the_launcher_next_to_the_process_counts(environment: dict[str, str], start: Start | None) -> None:
    assert start_of(environment) == start


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
    ],
)
def test_what_a_library_from_pypi_does_not_understand_is_told_before_it_starts(
    environment: dict[str, str], wheel: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_wheel", lambda: wheel)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(LaunchError) as told:
        launchers.check_wheel(environment)
    assert way_out in str(told.value) and "DISTCONV_LAUNCH=trust" in str(told.value)
    launchers.check_wheel({**environment, "DISTCONV_LAUNCH": "trust"})


@pytest.mark.parametrize(
    ("environment", "wheel"),
    [
        ({}, "mpich"),
        (BATCH, "mpich"),
        (BATCH, "openmpi"),
        (PMI2, "mpich"),
        (HYDRA, "mpich"),
        (HYDRA_IN_JOB, "mpich"),
        ({**HYDRA, "PMIX_RANK": "0"}, "mpich"),
        (OPEN_MPI_IN_JOB, "openmpi"),
        (PMIX, "openmpi"),
        (PRTERUN, "openmpi"),
        (PMIX, ""),  # a cluster's MPICH may understand PMIx
        (STEP, ""),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, "mpich"),
    ],
)
def test_what_it_may_understand_is_left_to_mpi(
    environment: dict[str, str], wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "_wheel", lambda: wheel)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    launchers.check_wheel(environment)


def only(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    for name, value in {FOUND: "", **environment}.items():  # check sets that one, which so is put back
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("environment", [STEP, PMI2, PMIX, HYDRA, HYDRA_IN_JOB, OPEN_MPI, TORCHRUN])
def test_one_rank_of_several_processes_is_wrong(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, environment)
    with pytest.raises(LaunchError, match="each would train alone"):
        launchers.check(1, "MPICH")
    monkeypatch.setenv("DISTCONV_LAUNCH", "trust")
    launchers.check(1, "MPICH")
    monkeypatch.setenv("DISTCONV_LAUNCH", "maybe")
    with pytest.raises(EnvironmentVariableError, match="check or trust"):
        launchers.check(1, "MPICH")


@pytest.mark.parametrize("environment", [{}, BATCH, {**HYDRA_IN_JOB, "PMI_SIZE": "1", "PMI_RANK": "0"}])
def test_one_rank_of_one_process_is_right(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, environment)
    launchers.check(1, "MPICH")


def test_what_a_rank_starts_is_none_unless_a_launcher_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, PMI2)
    launchers.check(4, "MPICH")
    for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(name)
    launchers.check(1, "MPICH")  # a process of its own: srun's variables are there still
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(LaunchError):
        launchers.check(1, "Open MPI")


SCRIPT = """\
import sys
import textwrap
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
@pytest.mark.parametrize("command", [False, True])
def test_of_copies_that_srun_starts_one_speaks_and_all_end(tmp_path: Path, command: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["-m", "distconv", "info"] if command else [str(script)]
    copies = []
    for rank in range(2):
        environment = {**clean(), **STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank)}
        pipe = subprocess.PIPE
        copies.append(subprocess.Popen([sys.executable, *words], env=environment, stdout=pipe, stderr=pipe, text=True))
    printed = [copy.communicate(timeout=60) for copy in copies]
    assert [copy.returncode for copy in copies] == ([2, 2] if command else [1, 1])
    assert printed[1] == ("", "")
    stdout, stderr = printed[0]
    assert stdout == "" and stderr.count("\n") == 1
    assert stderr.startswith("distconv: srun started 2 processes of which ")


@pytest.mark.mpi
def test_torchrun_ends_with_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "trains alone" not in ended.stdout
    assert ended.stderr.count("distconv: torchrun started 2 processes of which MPI does not know") == 1


@pytest.mark.parametrize("rank", [0, 3])
def test_an_mpi_that_ends_the_process_when_it_starts_is_told_by_the_first(tmp_path: Path, rank: int) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text("import os\nos._exit(16)\n")
    environment = {**clean(), **STEP, "SLURM_PROCID": str(rank), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", "import distconv"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 16 and ended.stdout == ""
    expected = "distconv: srun started 4 processes in which MPI did not start; use srun with another --mpi="
    assert ended.stderr.startswith(expected if rank == 0 else "") and ended.stderr.count("\n") == (rank == 0)


def test_nothing_is_told_where_mpi_starts_or_is_missing() -> None:
    script = """
        import sys
        from distconv.process import launchers
        del sys.modules["mpi4py.MPI"]
        try:
            with launchers.told_if_mpi_ends_it({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}):
                raise ImportError
        except ImportError:
            print("as it was")
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("as it was\n", "")


def test_the_first_of_the_processes_speaks() -> None:
    for environment, rank in ((PMI2, "PMI_RANK"), (OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (HYDRA, "PMI_RANK")):
        assert not launchers.speaks(environment)
        assert launchers.speaks({**environment, rank: "0"})
    assert launchers.speaks({})

"""Which memory MPI is handed: as its own library says, tried between different ranks, and decided by all of them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication.gpu import cuda_aware, device_transport
from distconv.communication.gpu.cuda_aware import MpiSupport, is_reported_cuda_aware, probe_mpi_support
from distconv.communication.transport import Exchange, Reduction
from tests.distconv.layouts import raises_everywhere
from tests.harness.late_gpu import DEVICE
from tests.harness.late_libraries import late_gpu

REFUSED = "MPI does not transfer device memory correctly, although {} claims support. Set DISTCONV_TRANSPORT=host"


@pytest.fixture
def library(tmp_path):
    """Makes what mpi4py's module and its MPI are: a library that another one, the only one loaded, is linked with."""

    def made(answer):
        source, module, mpi = tmp_path / "mpi.c", tmp_path / "module.c", f"mpi_that_answers_{answer}"
        source.write_text(f"int MPIX_Query_cuda_support(void) {{ return {answer}; }}\n" if answer is not None else "")
        module.write_text("int unused;\n")
        for name, text, needs in ((f"lib{mpi}", source, []), ("module", module, ["-Wl,--no-as-needed", f"-l{mpi}"])):
            command = ["cc", "-shared", "-fPIC", "-o", tmp_path / f"{name}.so", text, f"-L{tmp_path}", *needs]
            subprocess.run([*command, f"-Wl,-rpath,{tmp_path}"], check=True)
        path = str(tmp_path / "module.so")
        ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        return path

    return made


@pytest.mark.fault(54)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("answer", [1, 0, None])
def test_the_mpi_that_mpi4py_has_for_itself_is_asked(library, monkeypatch, answer):
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    monkeypatch.setattr(MPI, "__file__", library(answer))
    assert not hasattr(ctypes.CDLL(None), "MPIX_Query_cuda_support")
    assert is_reported_cuda_aware() == bool(answer)


def test_the_mpi_in_use_can_be_asked():
    # Both MPICH (since 4.0) and Open MPI have it; of another MPI nothing is claimed.
    known = any(name in MPI.Get_library_version() for name in ("MPICH Version", "Open MPI"))
    library = ctypes.CDLL(MPI.__file__, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    assert hasattr(library, "MPIX_Query_cuda_support") or not known


def test_a_cray_says_so_by_a_variable(monkeypatch):
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    assert is_reported_cuda_aware()


@pytest.fixture
def aware(comm, monkeypatch):
    """A late GPU, and an MPI that says it takes its memory, as the CPU's MPI does."""
    monkeypatch.delenv("DISTCONV_TRANSPORT", raising=False)
    monkeypatch.setattr(cuda_aware, "is_reported_cuda_aware", lambda: True)
    with late_gpu("late") as gpu:
        yield gpu


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("MPICH Version: 5.0.0", MpiSupport(True, True)),
        ("MPI VERSION : CRAY MPICH version 8.1.29.26 (ANL base 3.4a2)", MpiSupport(True, True)),
        ("Open MPI v5.0.8, package: Open MPI", MpiSupport(True, False)),
        ("Spectrum MPI 10.4", MpiSupport(True, False)),
    ],
)
def test_sums_go_from_device_memory_only_where_nonblocking_ones_take_it(comm, aware, monkeypatch, version, expected):
    monkeypatch.setattr(MPI, "Get_library_version", lambda: version)
    if not expected.sums:
        monkeypatch.setattr(cuda_aware, "_sums_arrive", lambda comm, device: pytest.fail("a sum was tried"))
    own = comm.Dup()
    assert probe_mpi_support(own, DEVICE) == expected
    device_transport.choose_mpi(own, DEVICE)
    reduction = Reduction(own, aware.tensor(torch.ones(3)), "a sum")
    message = (1 - own.rank, aware.tensor(torch.ones(3)))
    assert reduction._staging.direct == expected.sums
    assert reduction.wait().cpu().tolist() == [own.size] * 3
    if own.size == 2:
        exchange = Exchange(own, [message], [message], "a message")
        assert exchange._staging.direct
        exchange.wait()


@pytest.mark.cpu
@pytest.mark.ranks(2, 3)
def test_where_one_ranks_mpi_takes_none_nobody_hands_it_any(comm, aware, monkeypatch):
    monkeypatch.setattr(cuda_aware, "is_reported_cuda_aware", lambda: comm.rank != 1)
    assert probe_mpi_support(comm, DEVICE) == MpiSupport()
    monkeypatch.setenv("DISTCONV_TRANSPORT", "host")
    monkeypatch.setattr(cuda_aware, "is_reported_cuda_aware", lambda: True)
    assert probe_mpi_support(comm, DEVICE) == MpiSupport()


@pytest.mark.cpu
@pytest.mark.fault(54, 97)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("lost", ["_messages_arrive", "_sums_arrive"])
def test_what_one_rank_does_not_get_is_an_error_on_all(comm, aware, monkeypatch, forced, lost):
    # The last rank sends and adds what lies elsewhere, as an MPI does that takes the pointer for one of the host.
    kept = []  # mpi4py does not keep what it is given

    def elsewhere(tensor, memory_of=cuda_aware.device_buffer):
        kept.append(bytearray(memory_of(tensor)))
        return MPI.buffer(kept[-1])

    tried = getattr(cuda_aware, lost)

    def arrives(comm, device):
        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(cuda_aware, "device_buffer", elsewhere)
            return tried(comm, device)

    if forced:
        monkeypatch.setenv("DISTCONV_TRANSPORT", "cuda-aware")
    monkeypatch.setattr(MPI, "Get_library_version", lambda: "MPICH")
    monkeypatch.setattr(cuda_aware, lost, arrives)
    raises_everywhere(
        comm,
        dc.CommunicatorError,
        REFUSED.format("DISTCONV_TRANSPORT" if forced else "it"),
        lambda: probe_mpi_support(comm, DEVICE),
    )


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_the_trial_is_longer_than_what_goes_along_with_its_announcement(comm, aware, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        cuda_aware,
        "device_buffer",
        lambda tensor, of=cuda_aware.device_buffer: sizes.append(tensor.nbytes) or of(tensor),
    )
    assert probe_mpi_support(comm, DEVICE).messages
    assert min(sizes) >= 4 << 20

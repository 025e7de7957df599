"""``distconv info``: the same lines on every rank, printed once."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

import distconv
from distconv.errors import CommunicatorError
from distconv.jobs.commands import information
from distconv.process import environment
from tests.jobs.approved import assert_approved


def test_every_rank_describes_the_same_job(comm):
    lines = information.describe(comm)
    assert comm.allgather(lines) == [lines] * comm.size
    found = dict(lines)
    assert len(found) == len(lines)
    assert found["distconv"] == distconv.__version__
    assert found["torch"] == torch.__version__
    assert found["ranks"] == f"{comm.size} on 1 node"


@pytest.mark.ranks(2)
def test_threads_that_differ_between_ranks_are_shown_as_a_range(comm, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + comm.rank)
    assert dict(information.describe(comm))["torch threads"] == "1 to 2 per rank"


@pytest.mark.ranks(2)
def test_ranks_on_several_machines_are_counted_by_node(comm, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: f"node{comm.rank}")
    assert dict(information.describe(comm))["ranks"] == "2 on 2 nodes"


@pytest.mark.ranks(1)
def test_variables_are_shown_as_they_are_set(comm, monkeypatch):
    monkeypatch.setenv("DISTCONV_TIMEOUT_S", "90")
    monkeypatch.delenv("DISTCONV_CHECK", raising=False)
    found = dict(information.describe(comm))
    assert found["DISTCONV_TIMEOUT_S"] == "90"
    assert found["DISTCONV_CHECK"] == "not set: plan"
    assert {name for name in found if name.startswith("DISTCONV_")} == {each.name for each in environment.VARIABLES}


@pytest.mark.ranks(1, 2)
def test_names_and_values_are_printed_in_two_columns_by_rank_0(comm, capsys, monkeypatch):
    monkeypatch.setattr(information, "_memory", lambda comm: "260 MiB")  # it grows
    lines = information.describe(comm)
    assert information.run(argparse.Namespace()) == 0
    printed = capsys.readouterr().out.splitlines()
    width = max(len(name) for name, _ in lines) + 2
    assert [(line[:width].strip(), line[width:]) for line in printed] == ([] if comm.rank else lines)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_rank_is_what_the_system_says_and_has_three_parts(comm):
    total, *parts = map(int, re.findall(r"(\d+) (?:MiB|of|shared)", information._memory(comm)))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    assert total == pytest.approx(max(comm.allgather(resident)), rel=0.05)
    assert len(parts) == 3 and sum(parts) == pytest.approx(total, abs=3)
    assert all(parts[:2])


def test_memory_and_transports_are_told_as_approved(monkeypatch):
    text = "VmRSS: 9 kB\nRssAnon:\t   40960 kB\nRssFile:\t  204800 kB\nRssShmem:\t    3072 kB\n"
    monkeypatch.setattr(information, "Path", lambda path: SimpleNamespace(read_text=lambda: text))
    ranks = SimpleNamespace(allgather=lambda own: [{"Anon": 250 << 20}, own, own] if len(own) == 3 else [own])
    lines = [information._memory(MPI.COMM_SELF), information._memory(ranks)]
    text = "nothing"
    assert information._memory(MPI.COMM_SELF) == "unknown"

    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(information, "Path", missing)
    assert information._memory(MPI.COMM_SELF) == "unknown"
    monkeypatch.setattr(information.device_transport, "needs_process_groups", lambda: True)
    lines.append(information._transport(MPI.COMM_SELF))
    monkeypatch.setattr(information.device_transport, "needs_process_groups", lambda: False)
    lines.append(information._transport(MPI.COMM_SELF))
    monkeypatch.setattr(information, "device", lambda: torch.device("cuda"))
    for messages, sums, reason in ((1, 1, ""), (1, 0, ""), (0, 0, ""), (1, 1, "no driver"), (0, 1, "no driver")):
        taken = SimpleNamespace(messages=messages, sums=sums)
        monkeypatch.setattr(information.cuda_aware, "probe_mpi_support", lambda comm, gpu, taken=taken: taken)
        monkeypatch.setattr(information.device_transport, "describe_missing", lambda comm, gpu, reason=reason: reason)
        lines.append(information._transport(MPI.COMM_SELF))

    def fail(comm, gpu):
        raise CommunicatorError("ranks disagree")

    monkeypatch.setattr(information.cuda_aware, "probe_mpi_support", fail)
    assert_approved("information", "\n".join([*lines, information._transport(MPI.COMM_SELF)]))

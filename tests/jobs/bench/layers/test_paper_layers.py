"""``distconv bench layer --layer``: the printed text, and the profile of this machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv import cli
from distconv.jobs.bench.layers import paper_layers
from distconv.jobs.planning.single_layers import LAYERS
from distconv.perfmodel import Machine
from distconv.perfmodel.machine.step_mode import StepMode
from tests.jobs.bench import command

printing = command.printing


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(["bench", "layer", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_printed_text_is_as_approved(printing: command.Printing) -> None:
    words = ["--grid", "h=1", "--batch", "2", "--machine", "localhost"]
    printing.approve("layer-conv6", paper_layers, "layer", "--layer", "mesh_conv6_1", *words)


def test_this_machine_is_profiled_on_one_rank_and_over_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, known = LAYERS["mesh_conv6_1"], Machine.load("localhost")
    measured = []

    def measure(calls: Any, group: Any, device: Any, *, mode: StepMode) -> dict[str, float]:
        ((key, _),) = calls.items()
        measured.append((key, group.size, device, mode))
        return {key: float(len(measured))}

    monkeypatch.setattr(paper_layers, "profile_network", lambda *_: "links")
    monkeypatch.setattr(paper_layers, "measure_machine", lambda name, network, comm, device: known)
    monkeypatch.setattr(paper_layers, "measure_mode", lambda here, mode, *_: here.with_mode(mode, here.compute))
    monkeypatch.setattr(paper_layers, "measure", measure)
    device, mode = torch.device("cpu"), StepMode("channels_last")
    found = paper_layers.profile_this_machine(layer, 3, {"n": 1}, device, mode)
    assert [entry.table for entry in found.compute] == [{key: number} for number, (key, *_) in enumerate(measured, 1)]
    assert len(measured) == len(known.compute) and {each[1:] for each in measured} == {(1, device, mode)}


def test_input_weight_and_gradient_have_the_memory_format() -> None:
    grid = dc.ProcessGrid(MPI.COMM_SELF)
    bench = paper_layers.Bench(LAYERS["mesh_conv6_1"], 2, grid, torch.device("cpu"), "channels_last")
    for tensor in (bench.x.local, bench.error.local, bench.layer.weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)

"""``distconv bench layer``: the stack of layers, its report, and what it refuses."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.communication.transport import Traffic
from distconv.jobs.bench.layers import layer
from tests.jobs.bench import command
from tests.jobs.bench.layers.test_paper_layers import output
from tests.jobs.command_lines import assert_refused, commands_in, option_tests, parsed

printing = command.printing


@pytest.mark.ranks(2)
def test_a_stack_of_layers_holds_weights_gradients_and_momenta(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(["--channels", "8", "--size", "6", "--layers", "2", "--rounds", "1", "--no-compile"], capsys)
    if comm.rank == 0:
        found = json.loads(lines[-1])
        weights, biases = 2 * 8 * 8 * 3 * 3 * 4, 2 * 8 * 4
        assert found["alone_bytes"] == 3 * (weights + biases)
        assert found["held_bytes"] == [3 * (weights + biases) // 2] * 2
        assert found["ratio"] == 0.5


def test_input_and_weights_have_the_memory_format() -> None:
    options = parsed("bench layer", "--channels", "8", "--size", "6", "--memory-format", "channels_last")
    options = argparse.Namespace(**vars(options) | layer._stack(options))
    stack = layer.LayerStack(layer._step_options(options), dc.ProcessGrid(MPI.COMM_SELF))
    for tensor in (stack.x.local, stack.model[0][0].weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--machine", "localhost"], "--machine: only an option of a single layer. Select a layer with --layer"),
        (["--layer", "conv1", "--machine", "laptop"], "machine 'laptop': no built-in machine has this name"),
        (["--layer", "conv1", "--grid", "h=3"], "process grid h=3 has 3 parts but the communicator has 2 ranks"),
        (
            ["--layer", "conv1", "--rounds", "3"],
            "--rounds: not an option of a single layer (--layer conv1)",
        ),
        (["--layer", "conv1", "--no-compile"], "--no-compile: not an option of a single layer (--layer conv1)"),
        (["--device", "cpu"], "--device: only an option of a single layer. Select a layer with --layer"),
        (["--channels", "10", "--groups", "3"], "--groups 3: does not divide --channels 10"),
        (["--kernel", "2"], "--kernel 2: the kernel size must be odd"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert_refused(capsys, ["bench", "layer", *arguments], text)


STACK = ["layer", "--channels", "6", "--groups", "3", "--kernel", "5", "--layers", "2", "--size", "4", "--rounds", "3"]


def test_the_printed_text_is_as_approved(printing: command.Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    printing.replace_torch_processes()
    printing.approve("layer", layer, *STACK, "--batch", "2")
    options = argparse.Namespace(**vars(parsed("bench layer", *STACK[1:])))
    conv = torch.nn.Conv2d(4096, 64, 3)
    traffic = Traffic()
    traffic.sent.update({"redistribution": 5 << 20, "halo exchange": 3 << 18})
    traffic.reduced.update({("gradient of w", 4): 1 << 20, ("gradient of b", 2): 1 << 19, ("norm", 4): 8})
    monkeypatch.setattr("sys.argv", ["distconv"])
    split: Any = SimpleNamespace(model=torch.nn.Sequential(conv))
    grids: Any = [SimpleNamespace(size=4, shape={"c": parts}, describe=lambda: "a grid") for parts in (8, 4)]
    times = {"ranks": [0.001, 0.002, 0.004], "one": [0.002, 0.003, 0.003]}
    times |= {"torch": [0.003, 0.002, 0.004], "torch, compiled": [0.002, 0.0025, 0.004]}
    layer._report(options, grids[0], split, alone=3 << 20, held=[1 << 20, 2 << 20], traffic=traffic, times=times)
    for blocks in (1, 2, 4):
        monkeypatch.setattr(layer, "convolution_split", lambda _, parts, b=blocks: SimpleNamespace(blocks=b))
        print(*(layer._algorithm(split, grid) for grid in grids), sep="\n")
    printing.approve_printed("layer-report")


test_options_are_approved, test_documented_defaults_hold = option_tests(*commands_in(__file__))

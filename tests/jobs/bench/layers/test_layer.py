"""``distconv bench layer``: the paper's layers with predictions beside measurements, and the stack."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.jobs.bench.layers.test_paper_layers import output
from tests.jobs.command_lines import assert_refused


@pytest.mark.ranks(2)
def test_a_stack_of_layers_holds_weights_gradients_and_momenta(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(["--channels", "8", "--size", "6", "--layers", "2", "--rounds", "1"], capsys)
    if comm.rank == 0:
        found = json.loads(lines[-1])
        weights, biases = 2 * 8 * 8 * 3 * 3 * 4, 2 * 8 * 4
        assert found["alone_bytes"] == 3 * (weights + biases)
        assert found["held_bytes"] == [3 * (weights + biases) // 2] * 2
        assert found["ratio"] == 0.5


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
        (["--device", "cpu"], "--device: only an option of a single layer. Select a layer with --layer"),
        (["--channels", "10", "--groups", "3"], "--groups 3: does not divide --channels 10"),
        (["--kernel", "2"], "--kernel 2: the kernel size must be odd"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    comm: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert_refused(capsys, ["bench", "layer", *arguments], text)

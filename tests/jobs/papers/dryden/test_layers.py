"""The speed-ups of single layers that the paper prints, and what the model predicts for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distconv.jobs.bench.layers.paper_layers import PaperLayer
from distconv.jobs.papers.dryden.layers import CONV1, LAYERS, SLABS, SQUARES, section, speedups
from distconv.perfmodel.machine.machine import Machine

NUMBERS = re.compile(r"[-+]?\d+(\.\d+|%)")
PAGE = Path(__file__).parents[4] / "docs" / "evidence" / "paper-tables-layers.md"
LAYER = {(found.name, found.layer.channels, found.layer.kernel): found.layer for found in LAYERS}
RESNET_CONV1 = LAYER["conv1", 3, 7]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.load("lassen")


@pytest.mark.parametrize("grids", [SQUARES, SLABS])
def test_conv1_on_8_gpus_is_within_25_percent(machine: Machine, grids):
    forward, backward, both = speedups(machine, RESNET_CONV1, grids[CONV1.gpus])
    assert both == pytest.approx(CONV1.ratio, rel=0.25)
    assert forward < 1.25 and backward > forward  # "does not scale well", "fares better"


def test_a_layer_without_halo_on_a_machine_without_fixed_costs_scales_with_its_ranks(machine: Machine):
    """1 x 1 and wide enough to fill the device: compute alone, over 4 GPUs of a node."""
    wide = PaperLayer(512, 512, 512, 1)
    assert speedups(machine, wide, {"h": 2, "w": 2})[2] == pytest.approx(4, rel=0.01)


def test_the_page_has_the_present_layers(machine: Machine):
    """To rounding: the page's constants are fitted anew, and the machine's file has them with few digits."""
    lines = [line for line in PAGE.read_text().splitlines() if " S=" in line]
    rows = [line for line in section(machine) if " S=" in line]
    assert len(lines) == len(rows) == len(LAYERS) * len(SQUARES)
    for line, row in zip(lines, rows, strict=True):
        found, expected = (re.findall(r"-?\d+\.\d+", each) for each in (line, row))
        assert [float(number) for number in found] == pytest.approx([float(number) for number in expected], abs=0.03)
        assert NUMBERS.sub("", line) == NUMBERS.sub("", row)

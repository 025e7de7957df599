"""The networks of this folder with their inputs."""

from __future__ import annotations

from tests.layers.models.paper_networks.audio import ConvTasNet, WaveNet
from tests.layers.models.paper_networks.vision import VMamba
from tests.layers.models.paper_networks.volumes import CosmoFlow, STUNet
from tests.layers.models.paper_networks.weather import ClimaX, GraphCast
from tests.layers.models.third_party_networks import Network

PAPER = "its paper"
SOUND = ("n", "c", "h")
"""Axes of a sound: on grids of images its time is split as their rows are."""

PAPERS = {
    "ClimaX": Network(PAPER, ClimaX, (2, 3, 16, 24), others=(((2,), "n"),)),
    "GraphCast": Network(PAPER, GraphCast, (2, 3, 12, 16)),
    "CosmoFlow": Network(PAPER, CosmoFlow, (3, 2, 16, 24, 16)),
    "STU-Net": Network(PAPER, STUNet, (2, 1, 12, 16, 8)),
    "VMamba": Network(PAPER, VMamba, (2, 3, 24, 32)),
    "WaveNet": Network(PAPER, WaveNet, (2, 8, 101), dims=SOUND),
    "Conv-TasNet": Network(PAPER, ConvTasNet, (3, 1, 96), dims=SOUND),
}

"""Single convolutions of the paper, and their times over a grid as the performance model predicts them.

Source: Dryden et al. 2019, VI-A, Figures 2 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.operation_cost import OperationCosts
from distconv.perfmodel.graph.graph import Operation
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.machine import Machine


@dataclass(frozen=True)
class PaperLayer:
    """Convolution without bias on ``extent`` x ``extent`` inputs, padded by half its kernel."""

    channels: int
    extent: int
    filters: int
    kernel: int
    stride: int = 1

    def build(self) -> torch.nn.Conv2d:
        """Build the layer with weights from seed 0, which resets torch's random state."""
        torch.manual_seed(0)
        return torch.nn.Conv2d(
            self.channels, self.filters, self.kernel, self.stride, padding=self.kernel // 2, bias=False
        )

    def input_shape(self, batch: int) -> tuple[int, int, int, int]:
        """Return the input's shape (N, C, H, W)."""
        return batch, self.channels, self.extent, self.extent


LAYERS = {
    "conv1": PaperLayer(3, 224, 64, 7, stride=2),
    "res3b_branch2a": PaperLayer(512, 28, 128, 1),
    # From mesh2k (distconv.layers.models.mesh): its first convolution, and the first one of its sixth block.
    "mesh_conv1_1": PaperLayer(18, 2048, 128, 3, stride=2),
    "mesh_conv6_1": PaperLayer(128, 64, 128, 3, stride=2),
}
"""The layers of Figures 2 and 3 by name."""

PHASES = ("FP", "BP")
"""Forward pass and backward pass."""


def as_operation(layer: PaperLayer, batch: int) -> Operation:
    """Return the layer as an operation within a network, where its input needs a gradient.

    Parameters
    ----------
    layer : PaperLayer
    batch : int
        Samples.

    Returns
    -------
    Operation
    """
    (op,) = trace(torch.nn.Sequential(layer.build()), layer.input_shape(batch)).operations
    return replace(op, inputs=(replace(op.x, requires_grad=True),))


def predict_times(
    layer: PaperLayer, batch: int, axes: Mapping[str, int], ranks: int, machine: Machine
) -> dict[str, float]:
    """Predict the times of forward and backward pass.

    They include halo exchanges as far as these do not overlap with computation, but no gradient all-reduce.

    Parameters
    ----------
    layer : PaperLayer
    batch : int
        Samples.
    axes : mapping
        Size of each grid axis.
    ranks : int
    machine : Machine

    Returns
    -------
    dict of str to float
        Seconds of each of ``PHASES``.
    """
    op = as_operation(layer, batch)
    cost = OperationCosts(machine, ranks, Settings()).operation(
        op, AxisParts.from_axes(axes, ranks, machine.ranks_per_node)
    )
    return dict(zip(PHASES, (cost.forward, cost.backward), strict=True))

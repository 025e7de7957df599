"""Memory of pipelined training with stale weights, against stashing weights and against no pipeline.

Counted as the package torchsummary 1.5.1 counts, which the paper used: the output of every module's call, except those
of the model itself, nn.Sequential and nn.ModuleList (so what a functional call puts out does not count, and what a
module computes in place does), twice, for the activations and for their gradients; and the parameters. Its totals leave
out optimizer state and, here, the input.

Source: Zhang, Abdelrahman, "Pipelined training with stale weights in deep convolutional neural networks", Applied
Computational Intelligence and Soft Computing 2021, 4.1, 6.6, 6.7 and appendix D.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from distconv.perfmodel.graph.recorder import module_calls
from distconv.perfmodel.stages.devices import PartitionError
from distconv.plan import is_plannable_layer


@dataclass(frozen=True)
class Footprint:
    """Bytes of all ``weights``, and of the ``activations`` of one mini-batch that each forward stage puts out.

    K pairs of pipeline registers make K + 1 entries of ``activations``; the paper then speaks of 2 K + 2 stages.

    >>> Footprint(weights=100, activations=(10, 40)).increase()  # 2 more copies of 10, on top of 100 + 2 * (10 + 40)
    0.1
    """

    weights: float
    activations: tuple[float, ...]

    @property
    def total(self) -> float:
        """Bytes without a pipeline: weights, activations and gradients of the activations."""
        return self.weights + 2 * sum(self.activations)

    @property
    def kept(self) -> float:
        """Bytes of activations that wait for their backward stage.

        Forward stage i of 1 to K + 1 keeps them for 2 (K - i + 1) cycles, and a mini-batch enters in each.
        """
        registers = len(self.activations) - 1
        return sum(2 * (registers - stage) * held for stage, held in enumerate(self.activations))

    @property
    def stashed(self) -> float:
        """Bytes of the copies of all weights that stashing adds: one for each mini-batch in the pipeline, 2 K + 2.

        Appendix D speaks of 4 at K = 1, the only K it treats; that it is 2 K + 2 for others is our reading.
        """
        return 2 * len(self.activations) * self.weights

    def increase(self, *, stash: bool = False) -> float:
        """What the pipeline adds as a fraction of ``total``, with one copy of the weights or with stashed ones."""
        return (self.kept + (self.stashed if stash else 0)) / self.total


def footprint(model: nn.Module, sample: Sequence[int], batch: int, placement: Sequence[int] = ()) -> Footprint:
    r"""The footprint of ``model`` for mini-batches (``batch``, \*``sample``), found on meta tensors.

    ``placement`` is the paper's pipeline placement vector: a pair of registers after each of these layers, counted from
    1. Layers are convolutions and linear modules in the order of their calls; what follows one up to the next is in its
    stage.

    Raises
    ------
    PartitionError
        If ``placement`` does not rise, or leaves a stage without a layer.
    """
    if any(second <= first for first, second in pairwise((0, *placement))):
        raise PartitionError(f"placement {tuple(placement)}: layers are counted from 1 and must rise")
    model = copy.deepcopy(model).to("meta")
    layers, output_bytes = 0, [0.0] * (len(placement) + 1)

    def enter(name: str, module: nn.Module, arguments: object) -> None:
        nonlocal layers
        layers += is_plannable_layer(module)

    def add(outputs: Any) -> None:
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            output_bytes[bisect_left(placement, layers)] += output.nelement() * output.element_size()

    def counts(name: str, module: nn.Module) -> bool:
        return module is not model and not isinstance(module, (nn.Sequential, nn.ModuleList))

    with torch.no_grad(), module_calls(model, enter, add, counts):
        model(torch.empty((batch, *sample), device="meta"))
    if placement and placement[-1] >= layers:
        raise PartitionError(
            f"placement {tuple(placement)}: registers after layer {placement[-1]} of {layers} leave the last "
            f"stage without a layer; use at most {layers - 1}"
        )
    weights = sum(p.nelement() * p.element_size() for p in model.parameters())
    return Footprint(weights, tuple(output_bytes))

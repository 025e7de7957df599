"""Memory of pipelined training with stale weights, compared with weight stashing and with no pipeline.

Counts follow the package torchsummary 1.5.1, which the paper used. They include the parameters, and twice (activations
and their gradients) the output of every module's call, except for the model itself, nn.Sequential and nn.ModuleList.
Outputs of functional calls are thus omitted, and in-place modules are counted. Optimizer state and, here, the input are
not included.

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
    """Bytes of a pipeline with K pairs of pipeline registers, which the paper calls 2 K + 2 stages.

    Attributes
    ----------
    weights : float
        Bytes of all parameters.
    activations : tuple of float
        Bytes that each of the K + 1 forward stages outputs for one mini-batch.

    Examples
    --------
    >>> Footprint(weights=100, activations=(10, 40)).increase()  # 2 more copies of 10, on top of 100 + 2 * (10 + 40)
    0.1
    """

    weights: float
    activations: tuple[float, ...]

    @property
    def total(self) -> float:
        """Bytes without a pipeline: weights, activations and activation gradients."""
        return self.weights + 2 * sum(self.activations)

    @property
    def kept(self) -> float:
        """Bytes of activations that wait for their backward stage.

        Forward stage i of 1 to K + 1 keeps them for 2 (K - i + 1) cycles, and a mini-batch enters in each cycle.
        """
        registers = len(self.activations) - 1
        return sum(2 * (registers - stage) * held for stage, held in enumerate(self.activations))

    @property
    def stashed(self) -> float:
        """Bytes of the weight copies that stashing adds: one for each mini-batch in the pipeline, 2 K + 2.

        Appendix D gives 4 copies for K = 1, the only case it treats. The formula for other K is our interpretation.
        """
        return 2 * len(self.activations) * self.weights

    def increase(self, *, stash: bool = False) -> float:
        """Return the memory that the pipeline adds, as a fraction of ``total``.

        Parameters
        ----------
        stash : bool
            True for weight stashing. Otherwise there is one copy of the weights.

        Returns
        -------
        float
        """
        return (self.kept + (self.stashed if stash else 0)) / self.total


def footprint(model: nn.Module, sample: Sequence[int], batch: int, placement: Sequence[int] = ()) -> Footprint:
    """Return the footprint of a model, found on meta tensors.

    Parameters
    ----------
    model : Module
        Model with one input. It does not change.
    sample : sequence of int
        Shape (C, ...) of one sample.
    batch : int
        Samples of the mini-batch.
    placement : sequence of int
        The paper's pipeline placement vector: a pair of registers after each of these layers, counted from 1. Layers
        are convolutions and linear modules in the order of their calls; what follows a layer up to the next is in its
        stage.

    Returns
    -------
    Footprint

    Raises
    ------
    PartitionError
        If ``placement`` does not increase, or leaves a stage without a layer.
    """
    if any(second <= first for first, second in pairwise((0, *placement))):
        raise PartitionError(f"placement {tuple(placement)}: layers are counted from 1 and must rise")
    model = copy.deepcopy(model).to("meta")
    # `enter` counts a layer before its output is added, so `layers` is the number of that layer, from 1.
    layers, output_bytes = 0, [0.0] * (len(placement) + 1)

    def enter(name: str, module: nn.Module, arguments: object) -> None:
        nonlocal layers
        layers += is_plannable_layer(module)

    def add(outputs: Any) -> None:
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            # Registers after layer p: that layer, and what follows it up to the next layer, are before them.
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

"""Running statistics of batch norm where passes over micro-batches must not simply update them one after the other.

``deferred``: once per mini-batch, as if it had been normalised whole (Kim et al. 2020, torchgpipe). ``micro`` with
replicas: those of all micro-batches in their order, on every replica, as one process would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class StatisticsRecord:
    """Statistics of one call of layer ``layer`` in one micro-batch: ``count`` elements per channel, each of (C,).

    ``variance`` is the unbiased one, as torch keeps it.
    """

    microbatch: int
    layer: int
    count: int
    mean: torch.Tensor
    variance: torch.Tensor


class RunningStatistics:
    """Takes the running statistics of the batch norms in ``modules`` out of their forward passes.

    Inside :meth:`taken` a layer writes to scratch memory and a record is kept; :meth:`commit` brings records into the
    layers.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        layers = (layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm))
        self.layers = [layer for layer in dict.fromkeys(layers) if layer.track_running_stats]
        self.records: list[StatisticsRecord] = []

    @contextmanager
    def taken(self, microbatch: int) -> Iterator[None]:
        """Forward passes inside leave the layers' statistics as they are."""
        hooks = []
        for number, layer in enumerate(self.layers):
            if layer.training and layer.running_mean is not None and layer.running_var is not None:
                before, after = self._hooks(number, microbatch)
                hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self, number: int, microbatch: int) -> tuple[Callable[..., None], Callable[..., None]]:
        kept: dict[str, Any] = {}

        def before(layer: _BatchNorm, _: Any) -> None:
            assert layer.running_mean is not None and layer.running_var is not None
            names = ("running_mean", "running_var", "num_batches_tracked", "momentum")
            kept.update({name: getattr(layer, name) for name in names})
            layer.running_mean = torch.zeros_like(layer.running_mean)
            layer.running_var = torch.zeros_like(layer.running_var)
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked = layer.num_batches_tracked.clone()
            layer.momentum = 1.0  # what is written is then the statistics of this batch

        def after(layer: _BatchNorm, inputs: Any, _: Any) -> None:
            assert layer.running_mean is not None and layer.running_var is not None
            count = inputs[0].numel() // inputs[0].shape[1]
            self.records.append(StatisticsRecord(microbatch, number, count, layer.running_mean, layer.running_var))
            for name, value in kept.items():
                setattr(layer, name, value)

        return before, after

    def commit(self, records: Sequence[StatisticsRecord], deferred: bool) -> None:
        """Update the layers with ``records`` of one mini-batch, of all micro-batches in their order."""
        for number, layer in enumerate(self.layers):
            of_layer = sorted((r for r in records if r.layer == number), key=lambda record: record.microbatch)
            for mean, variance in [_merged(of_layer)] if deferred and of_layer else _each(of_layer):
                _update(layer, mean, variance)
        self.records.clear()


def _each(records: Sequence[StatisticsRecord]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(record.mean, record.variance) for record in records]


def _merged(records: Sequence[StatisticsRecord]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance of all batches as one (Chan et al. 1983, Eq. 2.1)."""
    first = records[0]
    count, mean, squares = first.count, first.mean.double(), first.variance.double() * (first.count - 1)
    for record in records[1:]:
        total = count + record.count
        delta = record.mean.double() - mean
        squares = squares + record.variance.double() * (record.count - 1) + delta**2 * (count * record.count / total)
        mean = mean + delta * (record.count / total)
        count = total
    return mean.to(first.mean.dtype), (squares / max(count - 1, 1)).to(first.variance.dtype)


def _update(layer: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """As torch's batch norm does in training; without momentum the average of all batches."""
    assert layer.running_mean is not None and layer.running_var is not None
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1
    share = layer.momentum
    if share is None:
        assert layer.num_batches_tracked is not None
        share = 1.0 / float(layer.num_batches_tracked)
    with torch.no_grad():
        layer.running_mean.mul_(1 - share).add_(mean, alpha=share)
        layer.running_var.mul_(1 - share).add_(variance, alpha=share)

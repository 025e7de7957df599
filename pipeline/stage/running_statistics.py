"""Running statistics of batch norm over micro-batches and replicas.

With ``batch_norm="deferred"``, they are updated once per mini-batch, with the statistics of all of it. With ``"micro"``
and replicas, those of all micro-batches are used in order on every replica, as in one process. With ``"micro"`` and
without replicas, torch's layers update them in each pass, and this module records nothing.

Source: Kim et al. 2020 (torchgpipe), deferred batch normalization.
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
    """Statistics of one call of a batch norm in one micro-batch.

    Attributes
    ----------
    microbatch : int
    layer : int
        Number of the batch norm in the stage.
    count : int
        Elements per channel.
    mean, variance : Tensor
        Shape (C,); the variance is unbiased, as in torch.
    """

    microbatch: int
    layer: int
    count: int
    mean: torch.Tensor
    variance: torch.Tensor


class RunningStatistics:
    """Collects running statistics of the batch norms in some modules.

    Inside :meth:`record_statistics` a layer writes to temporary tensors, and a record is kept. :meth:`commit` updates
    the layers.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        layers = (layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm))
        self.layers = [layer for layer in dict.fromkeys(layers) if layer.track_running_stats]
        self.records: list[StatisticsRecord] = []

    @contextmanager
    def record_statistics(self, microbatch: int) -> Iterator[None]:
        """Record the statistics of forward passes inside the block, and leave the layers' own unchanged."""
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
            # Fresh tensors: with momentum 1 they are the statistics of this micro-batch, kept in its record.
            layer.running_mean = torch.zeros_like(layer.running_mean)
            layer.running_var = torch.zeros_like(layer.running_var)
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked = layer.num_batches_tracked.clone()
            layer.momentum = 1.0  # the layer then writes the statistics of this batch alone

        def after(layer: _BatchNorm, inputs: Any, _: Any) -> None:
            assert layer.running_mean is not None and layer.running_var is not None
            count = inputs[0].numel() // inputs[0].shape[1]
            self.records.append(StatisticsRecord(microbatch, number, count, layer.running_mean, layer.running_var))
            for name, value in kept.items():
                setattr(layer, name, value)

        return before, after

    def commit(self, records: Sequence[StatisticsRecord], deferred: bool) -> None:
        """Update the layers with the records of one mini-batch, in the order of their micro-batches.

        Parameters
        ----------
        records : sequence of StatisticsRecord
            Records of all micro-batches and replicas.
        deferred : bool
            True to merge all of them. Otherwise they are used one by one.
        """
        for number, layer in enumerate(self.layers):
            # In the order of one process, whatever the schedule: an exponential average depends on it.
            of_layer = sorted((r for r in records if r.layer == number), key=lambda record: record.microbatch)
            statistics = [(record.mean, record.variance) for record in of_layer]
            for mean, variance in [_merge_statistics(of_layer)] if deferred and of_layer else statistics:
                _update(layer, mean, variance)
        self.records.clear()


def _merge_statistics(records: Sequence[StatisticsRecord]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased variance of all batches as one (Chan et al. 1983, Eq. 2.1)."""
    first = records[0]
    # Pairwise update of mean and squared deviations (Chan et al.), which does not cancel for large means.
    count, mean, squares = first.count, first.mean.double(), first.variance.double() * (first.count - 1)
    for record in records[1:]:
        total = count + record.count
        delta = record.mean.double() - mean
        squares = squares + record.variance.double() * (record.count - 1) + delta**2 * (count * record.count / total)
        mean = mean + delta * (record.count / total)
        count = total
    return mean.to(first.mean.dtype), (squares / max(count - 1, 1)).to(first.variance.dtype)


def _update(layer: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update running statistics as torch's batch norm does in training.

    Without momentum they are the average over all batches.
    """
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

"""torch.utils.checkpoint: blocks that are computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as recomputed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.idioms.bench import Bench, Found
from tests.idioms.table import idiom

Make = Callable[[], nn.Module]


def conv() -> nn.Module:
    return nn.Conv2d(4, 4, 3, padding=1)


class Around(nn.Module):
    """A convolution, a block that is recomputed, a linear layer."""

    def __init__(self, block: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.before, self.block, self.head, self.options = (
            nn.Conv2d(3, 4, 3, padding=1),
            block,
            nn.Linear(4, 5),
            options,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.block, self.before(x), **{"use_reentrant": False, **self.options})
        return self.head(y.mean((2, 3)))


def again(b: Bench, make: Make, **options: Any) -> Found:
    net = b.made(lambda: Around(make(), options))
    torch.manual_seed(7)
    for seed in range(2):
        F.cross_entropy(net(b.images(seed)), b.labels()).backward()
    return b.state(net) | b.gradients(net)


@idiom(quick=True)
def a_block_with_a_batch_norm(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()))


@idiom()
def a_block_with_a_cumulative_batch_norm(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.BatchNorm2d(4, momentum=None), nn.ReLU()))


@idiom()
def a_block_with_running_instance_norm(b: Bench) -> Found:
    return again(
        b, lambda: nn.Sequential(conv(), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU())
    )


@idiom()
def a_block_that_ends_in_an_instance_norm(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.InstanceNorm2d(4, track_running_stats=True)))


@idiom()
def a_block_with_dropout(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.Dropout(0.5), nn.ReLU()))


@idiom()
def a_block_that_ends_in_one_row(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1)))


@idiom()
def a_block_that_ends_in_a_large_pooling(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.MaxPool2d(7)))


@idiom()
def a_block_that_ends_in_a_large_convolution(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(4, 4, 7)))


class Slice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, :1] * 2


@idiom()
def a_block_that_ends_in_a_slice(b: Bench) -> Found:
    return again(b, lambda: nn.Sequential(conv(), nn.ReLU(), Slice()))


def saved(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.convolution.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@idiom()
def convolutions_alone_are_kept(b: Bench) -> Found:
    context = functools.partial(create_selective_checkpoint_contexts, saved)
    return again(b, lambda: nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), conv()), context_fn=context)


@idiom()
def a_sequence_is_recomputed_in_parts(b: Bench) -> Found:
    net = b.made(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
    )
    for seed in range(2):
        y = recomputed.checkpoint_sequential(net, 3, b.images(seed), use_reentrant=False)
        F.cross_entropy(y.flatten(1), b.labels() % 4).backward()
    return b.state(net) | b.gradients(net)


@idiom()
def a_block_within_a_block(b: Bench) -> Found:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return b.model.second(checkpoint(b.model.begin, x, use_reentrant=False))

    y = checkpoint(outer, b.images(), use_reentrant=False)
    F.cross_entropy(y.mean((2, 3))[:, :5], b.labels()).backward()
    return b.gradients() | b.state()


@idiom()
def a_reentrant_block(b: Bench) -> Found:
    x = b.images().requires_grad_()
    y = b.model.second(checkpoint(b.model.begin, x, use_reentrant=True))
    F.cross_entropy(y.mean((2, 3))[:, :5], b.labels()).backward()
    return b.gradients() | {"dL/dx": x.grad}


@idiom()
def a_block_that_takes_options_and_returns_two(b: Bench) -> Found:
    def block(x: torch.Tensor, scale: float, extra: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        y = b.model.begin(x) * scale
        return y, y.mean() if extra is None else extra

    y, mean = checkpoint(block, b.images(), 0.5, use_reentrant=False)
    (y.square().mean() + mean).backward()
    return b.gradients() | {"mean": mean}


@idiom()
def saved_tensors_wait_on_the_host(b: Bench) -> Found:
    with torch.autograd.graph.save_on_cpu():
        loss = b.loss()
    loss.backward()
    return b.gradients()


@idiom()
def saved_tensors_are_packed(b: Bench) -> Found:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(),), lambda packed: packed[0]):
        loss = b.loss()
    loss.backward()
    return b.gradients()


@idiom(refused="pass use_reentrant=False to both")
def a_reentrant_block_within_another_kind(b: Bench) -> Found:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(b.model.second, b.model.begin(x), use_reentrant=True) * 2

    checkpoint(outer, b.images().requires_grad_(), use_reentrant=False).square().mean().backward()
    return b.gradients() | b.state()


@idiom(refused="take that gradient outside the block")
def a_block_with_running_statistics_takes_a_gradient(b: Bench) -> Found:
    def block(x: torch.Tensor) -> torch.Tensor:
        y = b.model.begin(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return b.model.second(y) + slope.mean()

    checkpoint(block, b.images().requires_grad_(), use_reentrant=False).square().mean().backward()
    return b.gradients() | b.state()

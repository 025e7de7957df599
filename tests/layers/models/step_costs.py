"""Costs of a training step on this rank: the memory of its tensors, and the bytes that it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from distconv.communication.transport import Traffic


def peak_bytes(function: Callable[[], object]) -> int:
    """Call ``function``, and return how many bytes more than before torch's CPU allocator had given out at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def activation_bytes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """Peak of a forward pass: what autograd keeps for the backward pass, and temporary tensors; no weights."""
    kept: list[object] = []
    return peak_bytes(lambda: kept.append(model.train()(*inputs)))


def sent_bytes(traffic: Traffic) -> int:
    """Bytes that this rank sends; a ring sends 2 (p - 1) / p of an all-reduced buffer. Without weight gradients."""
    sums = sum(
        nbytes * 2 * (ranks - 1) / ranks
        for (what, ranks), nbytes in traffic.reduced.items()
        if not what.startswith("gradient sum")
    )
    return round(sum(traffic.sent.values()) + sums)

"""Runs that are resumed from their checkpoint, for the tests of each training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def assert_resumes_bit_for_bit(
    make: Callable[[], Any], folder: Path, step: int, evaluate: Callable[[Any], object] = lambda trainer: None
) -> None:
    """A second trainer goes on from the checkpoint of ``step`` with the samples, losses and state of the first.

    The first evaluates after it has saved, and others draw random numbers, neither of which changes a later step.
    """
    first, losses = make(), []
    for batch in first.batches():
        losses.append((batch.samples, first.step(*batch.tensors)))
        if first.step_count == step:
            first.save(str(folder / "saved"))
            evaluate(first)
    second = make()
    torch.rand(3)
    assert second.resume(str(folder / "saved"))
    assert second.step_count == step
    assert [(batch.samples, second.step(*batch.tensors)) for batch in second.batches()] == losses[step:]
    found = second.model.state_dict()
    for name, expected in first.model.state_dict().items():
        assert torch.equal(found[name], expected), name

"""A recorded stage computes in the mode that it is called in: no_grad, autocast, train, eval, other batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distconv.pipeline.splitting import split as split_module
from distconv.pipeline.splitting.graph_cuts import SplitError
from distconv.pipeline.splitting.split import split


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 2, 3), nn.Dropout(0.5), nn.Conv2d(2, 1, 3)

    def forward(self, x: Any) -> Any:
        return self.c(self.b(self.a(x) * 2))


MODES: dict[str, Callable[[], Any]] = {
    "usual": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "no_grad, bfloat16": lambda: _both(torch.no_grad(), torch.autocast("cpu", torch.bfloat16)),
}


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Any:
    with one, other:
        yield


@pytest.mark.parametrize("first", ["usual", "no_grad, bfloat16"])
def test_a_recorded_stage_computes_in_the_mode_that_it_is_called_in(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    def refusing(model: nn.Module) -> None:
        raise SplitError("not by torch.fx")

    monkeypatch.setattr(split_module, "trace_steps", refusing)
    torch.manual_seed(0)
    model, x = Recorded(), torch.randn(3, 1, 9, 9)
    stages = split(model, ["c"], x)
    for training in (True, False):
        model.train(training)
        for stage in stages:
            stage.train(training)
        for mode in (first, *MODES):
            for given in (x, x[:2]):
                with MODES[mode]():
                    torch.manual_seed(1)
                    expected = model(given)
                    torch.manual_seed(1)
                    found = stages[1](stages[0](given))
                assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad), mode
                assert torch.equal(found, expected), mode

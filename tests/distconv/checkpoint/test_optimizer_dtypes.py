"""Optimizer state from a checkpoint of another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.checkpoint.state import layout_resolver
from tests.distconv.layouts import grid_over, normal

OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "ASGD": torch.optim.ASGD,
    "SGD": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


class Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_state_of_an_optimizer_gets_the_dtype_of_its_parameter_and_counts_stay_as_they_are(
    tmp_path: Any, dtype: torch.dtype, name: str
) -> None:
    first, second = Scaled(torch.float32), Scaled(dtype)
    optimizer, other = OPTIMIZERS[name](first.parameters()), OPTIMIZERS[name](second.parameters())
    for step in range(2):
        for number, parameter in enumerate(first.parameters()):
            parameter.grad = normal(*parameter.shape, seed=step + number).float()
        optimizer.step()
    for state in optimizer.state.values():
        state["step" if "step" in state else "momentum_buffer"].add_(3000 if "step" in state else 0)
    dc.save_checkpoint(tmp_path, 1, first, optimizer)
    dc.load_checkpoint(tmp_path, second, other, convert_dtype=True)
    for old, new in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(new, old.to(dtype))
        assert optimizer.state[old].keys() == other.state[new].keys()
        for key, saved in optimizer.state[old].items():
            found = other.state[new][key]
            if isinstance(saved, torch.Tensor):
                follows = saved.shape == old.shape and key not in ("step", "mu_product", "eta", "mu")
                assert torch.equal(found, saved.to(dtype) if follows else saved), key
                assert found.dtype == (dtype if follows else saved.dtype), key
    for parameter in second.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.step()


@pytest.mark.ranks(2, 3)
def test_of_a_tied_weight_that_is_sharded_each_name_is_read_by_blocks(comm: Any) -> None:
    first, second = nn.Conv2d(6, 6, 1, bias=False), nn.Conv2d(6, 6, 1, bias=False)
    second.weight = first.weight
    model = dc.parallelize(nn.Sequential(first, second), grid_over(comm, c=comm.size), broadcast=True)
    found = [layout_resolver(model)(f"model/{name}.weight", (6, 6, 1, 1)) for name in "01"]
    assert found[0] is not None and found[0] == found[1] == model[0].weight.dist

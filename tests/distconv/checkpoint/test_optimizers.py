"""State of an optimizer is taken if its next step can be taken with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distconv import checkpoint
from distconv.checkpoint.optimizers import check_optimizer_state, optimizer_state
from distconv.checkpoint.reading import CheckpointMetadata
from tests.distconv.checkpoint.damage import refused
from tests.distconv.checkpoint.test_state import network, optimizer_of, steps


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "Adafactor", "RMSprop", "Rprop", "NAdam", "LBFGS"])
def test_what_an_optimizer_of_torch_has_made_is_what_it_needs(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    model[1].weight.requires_grad_(False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind == "SGD" else {}))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    tensors, values = optimizer_state(model, optimizer)
    tensors = {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
    groups = [{key: list(v) if isinstance(v, tuple) else v for key, v in group.items()} for group in values["groups"]]
    check_optimizer_state(CheckpointMetadata(1, tensors, values | {"groups": groups}), model, optimizer, "it")  # type: ignore[arg-type]


def without(checkpoint_: Any, *names: str) -> Any:
    tensors = {name: tensor for name, tensor in checkpoint_.tensors.items() if name not in names}
    return dataclasses.replace(checkpoint_, tensors=tensors)


@pytest.mark.fault(82)
@pytest.mark.ranks(1, 2)
def test_state_that_the_next_step_needs_must_be_there(comm: Any, shared_tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of("adam", model)
    steps(model, optimizer, 1)
    folder = checkpoint.save(shared_tmp_path, 1, *checkpoint.capture_state(model, optimizer, comm), comm)
    found = checkpoint.load(folder, comm)

    def told(changed: Any) -> str:
        return refused(comm, lambda: checkpoint.restore_state(changed, model, optimizer, comm))

    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert "1 differences: '0.weight/exp_avg' is missing" in told(without(found, "optimizer/0.weight/exp_avg"))
    moments = [name for name in found.tensors if name.endswith("/exp_avg")]
    assert f"{len(moments)} differences: '0.weight/exp_avg' is missing" in told(without(found, *moments))
    short = found.tensors | {"optimizer/0.weight/exp_avg": torch.zeros(3)}
    assert "'0.weight/exp_avg' is of shape (3,) in the checkpoint, its parameter of (4, 2, 3, 3)" in told(
        dataclasses.replace(found, tensors=short)
    )
    odd = found.tensors | {
        "optimizer/0.weight/exp_avg": found.tensors["optimizer/0.weight/exp_avg"].to(torch.complex64)
    }
    assert "is torch.complex64 in the checkpoint, torch.float64 in the optimizer" in told(
        dataclasses.replace(found, tensors=odd)
    )
    optimizer.param_groups[0]["search"] = "wolfe"  # an option that is a text, as torch's LBFGS has

    def with_option(key: str, value: Any) -> Any:
        groups = [{**found.values["groups"][0], key: value}]
        return dataclasses.replace(found, values=found.values | {"groups": groups})

    for key, saved, now in (("lr", "much", 0.01), ("search", 2, "wolfe")):
        expected = f"parameter group 0: {key!r} is {saved!r} in the checkpoint, {now!r} in the optimizer"
        assert expected in told(with_option(key, saved))
    checkpoint.restore_state(with_option("search", "armijo"), model, optimizer, comm)
    assert optimizer.param_groups[0]["search"] == "armijo"
    random = found.tensors | {"random/torch": torch.zeros(2, 9, dtype=torch.uint8)}
    assert "'random/torch' is torch.uint8 (2, 9), but" in told(dataclasses.replace(found, tensors=random))
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    checkpoint.restore_state(found, model, optimizer, comm)

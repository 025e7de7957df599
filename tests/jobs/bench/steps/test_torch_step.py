"""The layers that ``distconv bench step`` times: each kind takes the step of one process."""

from __future__ import annotations

import copy
import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.jobs.bench.steps import torch_step
from distconv.jobs.bench.steps.torch_step import StepOptions
from tests.jobs.approved import assert_approved, size_of
from tests.layers.compare import close, whole


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("memory_format", torch_step.FORMATS)
@pytest.mark.parametrize("kind", torch_step.KINDS)
def test_a_step_of_each_kind_equals_that_of_one_process(comm: Any, kind: str, memory_format: str) -> None:
    options = StepOptions(kind, 8, 4, 2, 2, memory_format)
    model, x, labels = torch_step.build(options)
    start = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    expected, x, grid = copy.deepcopy(model).double(), x.double(), dc.ProcessGrid(comm, h=comm.size)
    found = dc.parallelize(model.double(), grid)
    torch_step.training(expected, x, labels, options).step()
    torch_step.training(found, dc.scatter(x, grid), dc.scatter(labels, grid, dims="nhw"), options).step()
    for (name, one), several in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert one.grad is not None and several.grad is not None
        assert not torch.equal(one, start[name])
        close(whole(several.grad), one.grad, name)
        close(whole(several), one, name)


@pytest.mark.parametrize("kind", torch_step.KINDS)
def test_the_layers_of_each_kind_are_as_approved(kind: str) -> None:
    options = StepOptions(kind, 6, 4, 2, 3, "channels_last")
    model, x, labels = torch_step.build(options)
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in (x, *weights))
    x = x.double()
    trained = torch_step.training(model.double(), x, labels, options)
    before = trained.loss(x, labels).item()
    trained.step()
    lines = [f"{name} {list(value.shape)}" for name, value in model.named_parameters()]
    lines += [f"x {size_of(x)}, labels {labels.sum().item()} {list(labels.shape)}, y {size_of(model(x))}"]
    lines += [
        f"loss {before:.4f}, then {trained.loss(x, labels).item() - before:.3g}; {trained.optimizer.defaults['lr']}"
    ]
    assert_approved(f"bench/torch-step-{kind}", "\n".join(lines))


def test_the_program_takes_the_steps_that_are_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[Any] = []
    clock = iter(range(100))
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "compile", lambda loss: seen.append("compiled") or loss)
    monkeypatch.setattr(torch_step, "time", SimpleNamespace(perf_counter=lambda: float(next(clock)) ** 2))
    build = torch_step.build
    monkeypatch.setattr(torch_step, "build", lambda options: seen.append(options) or build(options))
    options = StepOptions("convolution", 5, 4, 1, 3, kernel=5, groups=2, loss="mean", momentum=0.5)
    described = json.dumps(options._asdict())
    for mode, asked in (("eager", "2\n1\n0\n"), ("compiled", "1\n")):
        monkeypatch.setattr("sys.argv", ["", described, "7", mode])
        monkeypatch.setattr("sys.stdin", io.StringIO(asked))
        torch_step.main()
    assert capsys.readouterr().out.splitlines() == ["[1.0, 5.0]", "[9.0]", "[13.0]"]
    assert seen == [7, options, 7, options, "compiled"]


def test_a_mean_as_loss_momentum_and_groups() -> None:
    options = StepOptions("convolution", 5, 4, 1, 3, kernel=5, groups=2, loss="mean", momentum=0.5)
    model, x, labels = torch_step.build(options)
    trained = torch_step.training(model, x, labels, options)
    assert trained.loss(x, labels).item() == model(x).mean().item()
    assert trained.optimizer.defaults["momentum"] == 0.5
    convolution = model[0][0]
    assert convolution.kernel_size == (5, 5) and convolution.groups == 2 and model(x).shape == x.shape

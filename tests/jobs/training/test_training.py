"""Steps of a training: its learning rate, its losses, its end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.checkpoint.manifest import commits
from distconv.jobs.training import recovery, training
from distconv.jobs.training import settings as common


class Line(training.Trainer):
    """One weight that is to be three: y = w x on samples of ones, three steps an epoch."""

    loader: Any = SimpleNamespace(steps=3, samples=6)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((outputs - labels) ** 2).mean()


def line(**settings: Any) -> Line:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    made = common.TrainingSettings(
        **{"dtype": "float64", "lr": 0.1, "momentum": 0.5, "warm_up": 0.5, "steps": 4} | settings
    )
    return Line(made, model, dc.ProcessGrid(MPI.COMM_SELF), MPI.COMM_SELF, "cpu")


def test_steps_by_hand() -> None:
    """The gradient of (w - 3)^2 is 2 (w - 3); rates are 0.05, 0.1, 0.1, 0.05: two up, half a cosine down."""
    trainer, x = line(), torch.ones(2, 1, dtype=torch.float64)
    weight, moved = 1.0, 0.0
    for rate in (0.05, 0.1, 0.1, 0.05):
        assert trainer.rate == pytest.approx(rate)
        assert trainer.step(x, 3 * x) == pytest.approx((weight - 3) ** 2)
        moved = 0.5 * moved + 2 * (weight - 3)
        weight -= rate * moved
        assert trainer.model.weight.item() == pytest.approx(weight)
    assert [step for step, _ in trainer.losses] == [1, 2, 3, 4]
    assert (trainer.step_count, trainer.epoch, trainer.rate) == (4, 1, pytest.approx(0))


def test_steps_that_are_given_take_the_place_of_epochs() -> None:
    assert [line(steps=steps, epochs=2).steps for steps in (None, 4, 7)] == [6, 4, 7]


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_is_an_error(loss: float) -> None:
    with pytest.raises(dc.DistconvError, match=rf"step 5: the loss is {loss}. Use a smaller --lr"):
        line().record_loss(5, loss)


def test_one_weight_that_is_not_finite_is_enough(tmp_path: Path) -> None:
    trainer = line()
    trainer.model.register_parameter("more", torch.nn.Parameter(torch.tensor([1.0, torch.inf, 2.0])))
    with pytest.raises(dc.DistconvError, match="step 0: 'more' is no longer finite, so no checkpoint is written"):
        trainer.save(str(tmp_path))


def test_a_run_goes_on_in_the_middle_of_its_epoch_and_ends_with_its_steps() -> None:
    trainer, asked = line(steps=7), []

    def epoch(number: int, start: int = 0) -> Any:
        asked.append((number, start))
        yield from ((number, step) for step in range(start, 3))

    trainer.loader, trainer.step_count = SimpleNamespace(steps=3, samples=6, epoch=epoch), 4
    taken = []
    for batch in trainer.batches():
        taken.append(batch)
        trainer.step_count += 1
    assert (asked, taken) == ([(1, 1), (2, 0)], [(1, 1), (1, 2), (2, 0)])


def test_words_and_numbers_of_a_trainer_on_a_grid_and_with_a_plan() -> None:
    trainer = line()
    assert (trainer.distribution, trainer.placement) == ("grid n=1", {"grid": "n=1", "plan": None})
    assert trainer.parameter_count == 1 and trainer.steps_in_flight == 0 and trainer.average is None
    assert trainer.evaluation_model is trainer.model and trainer.notes == {}
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    plan = dc.Plan({"*": {"n": 1}, "0": {"n": 1}}, 1)
    planned = Line(common.TrainingSettings(dtype="float32"), model, plan, MPI.COMM_SELF, "cpu")
    assert planned.distribution == "a plan of 2 patterns, samples on grid n=1" and planned.parameter_count == 9
    assert planned.placement == {"grid": "n=1", "plan": {"*": {"n": 1}, "0": {"n": 1}}}
    for name, seen in (("check_replicas", ()), ("load_weights", (Path("x.pt"),))):
        with pytest.MonkeyPatch.context() as patched:
            asked: list[Any] = []
            place = training if name == "check_replicas" else recovery
            patched.setattr(place, name, lambda *given: asked.append(given))  # noqa: B023
            getattr(trainer, {"load_weights": "load_initial_weights"}.get(name, name))(*seen)
            assert asked == [(trainer.model, *seen, MPI.COMM_SELF)]


def test_the_precision_is_that_of_the_forward_pass_and_not_of_the_loss() -> None:
    with pytest.raises(dc.DistconvError, match="--precision bf16: needs --dtype float32, not float64"):
        line(precision="bf16")
    seen: list[torch.dtype] = []
    for precision, inside in (("full", torch.float32), ("bf16", torch.bfloat16)):
        trainer = line(precision=precision, dtype="float32")
        trainer.model.register_forward_hook(lambda module, x, y: seen.append(y.dtype))
        trainer.loss = lambda y, target: seen.append(y.dtype) or (y - target).pow(2).mean()  # type: ignore[method-assign, func-returns-value]
        trainer.step(torch.ones(2, 1), torch.ones(2, 1))
        assert seen == [inside, torch.float32]
        seen.clear()


def test_gradients_are_clipped_and_weights_averaged() -> None:
    """The gradient of (1 - 3)^2 is -4, clipped to -0.5; the average begins with the weights of the first step."""
    trainer, x = line(clip_norm=0.5, ema=0.75, warm_up=0.0, steps=9, momentum=0.0), torch.ones(2, 1).double()
    weights = []
    for rate in (0.1, 0.1):
        before = trainer.model.weight.item()
        assert trainer.rate == pytest.approx(rate)
        trainer.step(x, 3 * x)
        weights.append(trainer.model.weight.item())
        assert weights[-1] == pytest.approx(before + rate * 0.5)
    assert trainer.average is not None and trainer.evaluation_model is trainer.average.module
    assert trainer.average.module.weight.item() == pytest.approx(0.75 * weights[0] + 0.25 * weights[1])
    batches = iter([SimpleNamespace(tensors=(x, None))])
    ((_, found),) = trainer.outputs(batches, lambda inputs: (inputs, torch.is_grad_enabled()))  # type: ignore[arg-type]
    assert torch.equal(found[0], x) and not found[1] and not trainer.average.module.training


def test_parts_of_a_batch_count_by_their_samples() -> None:
    """The parts have two samples and one, the losses 4 and 16, and the gradients -4 and -8."""
    trainer = line(accumulate=2, batch=4, momentum=0.0, warm_up=0.0)
    parts = [torch.ones(2, 1).double(), torch.ones(1, 1).double()]
    assert trainer.step(parts, [3 * parts[0], 5 * parts[1]]) == pytest.approx(4 * 2 / 3 + 16 / 3)  # type: ignore[arg-type]
    assert trainer.model.weight.grad.item() == pytest.approx(-4 * 2 / 3 - 8 / 3)


def test_a_scheduler_of_torch_sets_the_values_of_each_step() -> None:
    trainer, x = (
        line(scheduler="StepLR", scheduler_args={"step_size": 2, "gamma": 0.5}, steps=9),
        torch.ones(2, 1).double(),
    )
    rates = []
    for step in (0, 1, 2, 5, 3):
        trainer.step_count = step
        trainer.step(x, x)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.025, 0.05])
    once = line(scheduler="OneCycleLR", steps=10)
    once.schedule(once.optimizer)
    assert once.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 25)


def test_the_optimizers_state_is_split_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    split: list[Any] = []
    monkeypatch.setattr(training, "shard_optimizer", lambda *given: split.append(given))
    line()
    trainer = line(shard_optimizer=True)
    assert split == [(trainer.optimizer, MPI.COMM_SELF)]


def test_what_a_resumed_run_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = line(steps=4, ema=0.5)
    x = torch.ones(2, 1).double()
    first.step(x, 3 * x)
    assert (first.checkpoints_begun, first.checkpoints_written) == (0, 0)
    first.save(str(tmp_path))
    assert (first.checkpoints_begun, first.checkpoints_written) == (1, 1)
    for steps in (4, 6):
        second = line(steps=steps, ema=0.5)
        assert second.resume(str(tmp_path)) and second.step_count == 1
        assert torch.equal(second.average.module.weight, first.average.module.weight)  # type: ignore[union-attr]
    assert capsys.readouterr().out == (
        "the run had 4 steps and now has 6: from step 1 on, the learning rate is that of 6 steps. The results differ "
        "from those of a run with 6 steps from its start.\n"
    )
    assert not line().resume(str(tmp_path / "none"))
    (commit,) = commits(tmp_path)
    values = json.loads((commit.folder / "manifest.json").read_text())["values"]
    assert values["position"] == {"epoch": 0, "batch": 1, "samples": 6} and values["notes"] == {}
    assert values["placement"] == {"grid": "n=1", "plan": None}

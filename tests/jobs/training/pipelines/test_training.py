"""``distconv train classify --pipeline``: the numbers of a serial pipeline, checkpoints, what it writes and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

import distconv as dc
from distconv import cli
from distconv.errors import CheckpointError, DistconvError
from distconv.jobs.images.classification import ImagePipelineTrainer, ImageSettings, ImageTrainer
from distconv.jobs.images.samples import ImageSamples
from distconv.jobs.training.model_factory import build_classifier
from distconv.jobs.training.pipelines import training as pipeline_training
from distconv.jobs.training.pipelines.options import Pipelining, planned_pipelining
from distconv.jobs.training.pipelines.training import PipelineTrainer
from distconv.jobs.training.settings import learning_rate, make_optimizer, set_learning_rate
from distconv.pipeline import PipelinePlan, SerialPipeline, split
from distconv.plan import Plan
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused
from tests.jobs.commands.test_train_classify import (
    assert_of_two_epochs,
    assert_resumes_with_the_same_lines,
    lines_of,
    written,
)
from tests.jobs.images import image_files
from tests.jobs.training.pipelines.pipelined import BY_SHAPES, parsed, pipelining

LENET = ImageSettings("lenet5", batch=16, steps=7, lr=0.1, augment="crop")
VGG = ImageSettings("vgg11_bn", 2, batch=9, steps=6, optimizer="adam", lr=0.01)
"""With batch norm and dropout."""


def opened(comm: Any, folder: Path, settings: ImageSettings) -> tuple[ImageSamples, ImageSamples]:
    """The data over all ranks, and for this one alone."""
    write = image_files.write_mnist if settings.model == "lenet5" else image_files.write_cifar
    written(comm, folder, write)
    return ImageSamples(folder, comm), ImageSamples(folder, MPI.COMM_SELF)


def trained(trainer: ImagePipelineTrainer) -> dict[str, torch.Tensor]:
    """The model's state after all steps still to be taken, on every rank."""
    for batch in trainer.batches():
        trainer.step(*batch.tensors)
    trainer.synchronize()
    return trainer.model.state_dict()


def by_hand(
    settings: ImageSettings, alone: ImageSamples, of: Pipelining, cuts: Any
) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    """State and losses (step, loss) of a SerialPipeline with the same stages and learning rates."""
    loader = ImageTrainer(settings, alone, dc.ProcessGrid(MPI.COMM_SELF)).loader
    batches = (batch for epoch in count() for batch in loader.epoch(epoch))
    model = build_classifier(
        settings.model, alone.comm, seed=settings.seed, in_channels=alone.extents[0], classes=10, width=settings.width
    ).to(getattr(torch, settings.dtype))
    serial = SerialPipeline(
        split(model, cuts, torch.empty(2, *alone.extents, dtype=getattr(torch, settings.dtype))),
        F.cross_entropy,
        lambda parameters: make_optimizer(settings, parameters),
        of.schedule,
        of.microbatches,
        weights=of.weights,
        vertical_sync=of.vertical_sync,
    )
    assert settings.steps is not None
    for step, batch in zip(range(settings.steps), batches, strict=False):
        if step == of.switch_after:
            serial.switch("gpipe")
        for optimizer in filter(None, serial.optimizers):
            set_learning_rate(optimizer, learning_rate(step, settings.steps, settings.lr))
        serial.step(*(tensor.local for tensor in batch.tensors))
    serial.drain()
    return model.state_dict(), [(number + 1, loss) for number, loss in serial.losses]


@pytest.mark.long
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("settings", "schedule", "arguments"),
    [
        (LENET, "gpipe", ["--microbatches", "3"]),
        (LENET, "interleaved", ["--ppv", "1,2,3"]),
        (VGG, "pipedream", ["--vertical-sync"]),
        (LENET, "stale", ["--weights", "recompute", "--switch-after", "4"]),
        (ImageSettings(BY_SHAPES, 2, batch=5, steps=4, optimizer="sgd", lr=0.01), "1f1b-so", []),
    ],
    ids=lambda value: value.model if isinstance(value, ImageSettings) else "".join(value),
)
def test_losses_and_weights_are_those_of_the_serial_pipeline_bit_for_bit(
    comm: Any, shared_tmp_path: Path, settings: ImageSettings, schedule: str, arguments: list[str]
) -> None:
    if schedule == "interleaved" and comm.size == 3:
        arguments = ["--ppv", "1,2,3", "--stages", "2", "--replicas", "1,2"]
    samples, alone = opened(comm, shared_tmp_path, settings)
    of = pipelining(comm.size, schedule, *arguments)
    trainer = ImagePipelineTrainer(settings, samples, of)
    state = trained(trainer)
    expected, losses = by_hand(settings, alone, of, trainer.cuts)
    assert trainer.losses == losses
    assert [step for step, _ in losses] == list(range(1, trainer.steps + 1))
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
    trainer.close()


@pytest.mark.long
@pytest.mark.fault(66)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("arguments", [["stale"], ["pipedream", "--replicas", "2,1"]], ids=" ".join)
def test_a_resumed_run_is_that_which_made_the_checkpoint_bit_for_bit(
    comm: Any, shared_tmp_path: Path, arguments: list[str]
) -> None:
    """With dropout, batch norm, Adam's moments, and replicas."""
    samples, _ = opened(comm, shared_tmp_path, VGG)
    of = pipelining(comm.size, *arguments)
    first = ImagePipelineTrainer(VGG, samples, of)
    for batch in first.batches():
        first.step(*batch.tensors)
        if first.step_count == 4:
            first.save(str(shared_tmp_path / "saved"))
    first.synchronize()
    second = ImagePipelineTrainer(VGG, samples, of)
    assert second.resume(str(shared_tmp_path / "saved"))
    state = trained(second)
    assert second.losses == first.losses[4:]
    for name, expected in first.model.state_dict().items():
        assert torch.equal(state[name], expected), name
    first.close()
    second.close()


@pytest.mark.ranks(2)
def test_a_pipeline_in_half_precision_has_the_losses_of_one_process_in_it(comm: Any, shared_tmp_path: Path) -> None:
    settings = ImageSettings("lenet5", batch=16, steps=4, lr=0.1, precision="bf16")
    samples, alone = opened(comm, shared_tmp_path, settings)
    trainer = ImagePipelineTrainer(settings, samples, pipelining(comm.size, "gpipe", "--microbatches", "2"))
    trained(trainer)
    one = ImageTrainer(settings, alone, dc.ProcessGrid(MPI.COMM_SELF))
    expected = [one.step(*(tensor.local for tensor in batch.tensors)) for batch in one.batches()]
    assert [loss for _, loss in trainer.losses] == pytest.approx(expected, rel=2e-3)
    trainer.close()


@pytest.mark.fault(67)
@pytest.mark.ranks(2)
def test_other_stages_and_a_grid_go_on_from_a_checkpoint(comm: Any, shared_tmp_path: Path) -> None:
    settings = ImageSettings("lenet5", batch=16, steps=6, optimizer="adam", lr=0.01, dtype="float64")
    samples, _ = opened(comm, shared_tmp_path, settings)
    first = ImagePipelineTrainer(settings, samples, pipelining(comm.size, "gpipe", "--microbatches", "1"))
    for batch in first.batches():
        first.step(*batch.tensors)
        if first.step_count == 3:
            first.save(str(shared_tmp_path / "saved"))
    other = ImagePipelineTrainer(settings, samples, pipelining(2, "1f1b-sno", "--ppv", "4", "--microbatches", "1"))
    assert other.resume(str(shared_tmp_path / "saved"))
    trained(other)
    assert other.losses == first.losses[3:]
    grid = ImageTrainer(settings, samples, dc.ProcessGrid(comm, h=comm.size))
    assert grid.resume(str(shared_tmp_path / "saved"))
    losses = [grid.step(*batch.tensors) for batch in grid.batches()]
    assert losses == pytest.approx([loss for _, loss in first.losses[3:]], rel=1e-10)
    first.close()
    other.close()


def command(data: Path, *more: str) -> list[str]:
    return ["train", "classify", "--data", str(data), "--out", str(data / "out"), "--batch", "16", *more]


@pytest.mark.long
@pytest.mark.ranks(3)
def test_the_command_writes_a_line_for_each_step_and_resumes(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(comm, shared_tmp_path)
    arguments = command(data, "--pipeline", "stale", "--epochs", "2", "--checkpoint-every", "4")
    assert cli.main(arguments) == 0
    comm.Barrier()
    complete = lines_of(data)
    assert_of_two_epochs(complete)
    summary = json.loads((data / "out" / "summary.json").read_text())
    assert summary["pipeline"]["schedule"] == "stale"
    assert summary["pipeline"]["cuts"] == ["c3", "c5"]
    assert summary["final_loss"] == complete[6]["loss"]
    assert (data / "out" / "result.png").read_bytes()[:4] == b"\x89PNG"
    said = f"6 steps, stale of {comm.size} stages split before c3"
    assert (said in capsys.readouterr().out) == (comm.rank == 0)
    assert_resumes_with_the_same_lines(comm, data, "step-000006", arguments)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--microbatches", "2"], "--microbatches: only an option of pipelines"),
        (["--pipeline", "fbp-as"], "forward and backward at the same time can be simulated, not run"),
        (["--pipeline", "stale", "--microbatches", "2"], "it updates after every mini-batch"),
        (["--pipeline", "gpipe", "--weights", "stash"], "gpipe: weights='stash' must be one of recompute"),
        (["--pipeline", "gpipe", "--vertical-sync"], "gpipe: option 'vertical_sync' does not apply"),
        (["--pipeline", "gpipe", "--stages", "3"], "3 stages need 1 + 1 + 1 = 3 ranks, but the communicator has 2"),
        (["--pipeline", "gpipe", "--replicas", "3"], "--replicas 3: 2 ranks cannot form stages of 3 ranks each"),
        (["--pipeline", "gpipe", "--replicas", "2,1"], "2 stages need 2 + 1 = 3 ranks"),
        (
            ["--pipeline", "gpipe", "--ppv", "1,2", "--stages", "2"],
            "--ppv 1,2: splits the model into 3 parts, which are",
        ),
        (
            ["--pipeline", "interleaved", "--ppv", "1,2"],
            "--ppv 1,2: splits the model into 3 parts, which are not whole",
        ),
        (
            ["--pipeline", "interleaved", "--switch-after", "1"],
            "--switch-after: not supported by interleaved, which has 2 chunks on each rank",
        ),
        (["--pipeline", "stale", "--ppv", "9"], "cut 9: a register must come after one of the layers 1 to 4 of 5"),
        (["--pipeline", "stale", "--grid", "n=2"], "argument --grid: not allowed with argument --pipeline"),
        (["--pipeline", "stale", "--model", "vgg11"], "--model vgg11 fails on images of (1, 28, 28): RuntimeError: "),
        (["--pipeline", "stale", "--lr", "1e38"], ": the loss is nan. Use a smaller --lr, or check the data"),
        (
            ["--pipeline", "stale", "--check-replicas-every", "2"],
            "--check-replicas-every: cannot be combined with a pipeline, whose stages",
        ),
        (["--pipeline", "stale", "--devices", "old:1,new:1"], "--devices: only an option of --pipeline-plan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    data = written(comm, shared_tmp_path)
    assert_refused(capsys, command(data, *arguments), message, among_notes=True)


# --- Pipeline plans ---


def planned(comm: Any, folder: Path, settings: ImageSettings, plan: PipelinePlan, *more: str) -> Pipelining:
    if comm.rank == 0:
        plan.save(folder / "pipeline.json")
    comm.Barrier()
    given = ["--model", settings.model, "--batch", str(settings.batch), *more]
    found = planned_pipelining(parsed(*given, "--pipeline-plan", str(folder / "pipeline.json")), comm)
    assert found is not None
    return found


FIRST_STAGE = Plan({"*": {"h": 2}, "c3": {"c": 2}}, 2)
LENET_PLAN = PipelinePlan("lenet5", 16, 3, ("c5",), (1, 1), (FIRST_STAGE, None), "1f1b-sno", 2)


@pytest.mark.long
@pytest.mark.ranks(3)
def test_a_pipeline_plan_trains_as_the_serial_pipeline_evaluates_and_resumes(comm: Any, shared_tmp_path: Path) -> None:
    """With weights that are sharded over channels, whose checkpoints are whole."""
    settings = replace(LENET, steps=6, dtype="float64", optimizer="adam", lr=0.01)
    samples, alone = opened(comm, shared_tmp_path, settings)
    of = planned(comm, shared_tmp_path, settings, LENET_PLAN)
    first = ImagePipelineTrainer(settings, samples, of)
    for batch in first.batches():
        first.step(*batch.tensors)
        if first.step_count == 3:
            first.save(str(shared_tmp_path / "saved"))
            first.finish_steps()
    first.synchronize()
    second = ImagePipelineTrainer(settings, samples, of)
    assert second.resume(str(shared_tmp_path / "saved"))
    state = trained(second)
    assert [loss for _, loss in second.losses] == pytest.approx([loss for _, loss in first.losses[3:]], rel=1e-10)
    for name, expected in first.model.state_dict().items():
        assert torch.allclose(state[name], expected, rtol=1e-9, atol=1e-12), name
    assert second.evaluate("test").loss == pytest.approx(first.evaluate("test").loss, rel=1e-9)
    first.close()
    second.close()
    expected_state, losses = by_hand(settings, alone, of, list(of.cuts or ()))
    assert [loss for _, loss in first.losses] == pytest.approx([loss for _, loss in losses], rel=1e-10)
    for name, value in state.items():
        assert torch.allclose(value, expected_state[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.ranks(3)
def test_a_pipeline_plan_for_another_batch_is_refused(
    comm: Any, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, path = written(comm, shared_tmp_path), shared_tmp_path / "pipeline.json"
    if comm.rank == 0:
        LENET_PLAN.save(path)
    comm.Barrier()
    assert_refused(
        capsys, command(data, "--pipeline-plan", str(path), "--batch", "8"), "made for batch=16, found batch=8"
    )


@pytest.mark.ranks(3)
def test_stages_with_plans_begin_with_the_weights_of_a_file(comm: Any, shared_tmp_path: Path) -> None:
    samples, alone = opened(comm, shared_tmp_path, LENET)
    wanted = ImageTrainer(replace(LENET, seed=5), alone, dc.ProcessGrid(MPI.COMM_SELF)).model.state_dict()
    if comm.rank == 0:
        torch.save(wanted, shared_tmp_path / "other.pt")
    comm.Barrier()
    of = planned(comm, shared_tmp_path, LENET, LENET_PLAN)
    trainer = ImagePipelineTrainer(LENET, samples, of)
    trainer.load_initial_weights(shared_tmp_path / "other.pt")
    trainer.synchronize()  # the model gets what the stages have
    for name, found in trainer.model.state_dict().items():
        assert torch.equal(found, wanted[name]), name
    trainer.close()


@pytest.mark.ranks(2)
def test_a_grid_begins_with_the_weights_of_a_file_that_fits(comm: Any, shared_tmp_path: Path) -> None:
    samples, alone = opened(comm, shared_tmp_path, LENET)
    wanted = ImageTrainer(replace(LENET, seed=5), alone, dc.ProcessGrid(MPI.COMM_SELF)).model.state_dict()
    if comm.rank == 0:
        torch.save(wanted, shared_tmp_path / "other.pt")
        torch.save({"c1.weight": torch.zeros(3)}, shared_tmp_path / "wrong.pt")
    comm.Barrier()
    trainer = ImageTrainer(LENET, samples, dc.ProcessGrid(comm, c=2))
    trainer.load_initial_weights(shared_tmp_path / "other.pt")
    for name, found in trainer.model.state_dict().items():
        assert torch.equal(found, wanted[name]), name
    with pytest.raises(CheckpointError, match="the weights do not fit the model"):
        trainer.load_initial_weights(shared_tmp_path / "wrong.pt")


@pytest.mark.ranks(2)
def test_stages_of_a_plan_run_on_the_ranks_with_their_kinds_of_devices(comm: Any, shared_tmp_path: Path) -> None:
    plan = PipelinePlan("lenet5", 16, 2, ("c5",), (1, 1), (None, None), "pipedream", kinds=("old", "new"))
    settings = replace(LENET, steps=4, dtype="float64")
    samples, alone = opened(comm, shared_tmp_path, settings)
    of = planned(comm, shared_tmp_path, settings, plan, "--devices", "new:1,old:1")
    trainer = ImagePipelineTrainer(settings, samples, of)
    assert trainer.pipe.stage == 1 - comm.rank
    state = trained(trainer)
    assert "on old, new" in trainer.distribution and trainer.placement["pipeline"]["kinds"] == ("old", "new")
    trainer.close()
    expected, losses = by_hand(settings, alone, of, list(of.cuts or ()))
    assert [loss for _, loss in trainer.losses] == pytest.approx([loss for _, loss in losses], rel=1e-12)
    for name, value in state.items():
        assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-14), name


class Recorded(SimpleNamespace):
    """Double of a pipeline that keeps its arguments and counts calls."""

    def __init__(self, *given: Any, optimizer: Any, **named: Any) -> None:
        super().__init__(given=given, named=named, calls=[], losses=[], replica=0, minibatches=0)
        self.optimizer = optimizer(given[0][0].parameters())

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        rate = self.optimizer.param_groups[0]["lr"]
        self.calls.append(("step", inputs.tolist(), labels.tolist(), rate))
        self.losses.append((len(self.losses), 0.5))
        return 0.25

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *given: self.calls.append((name, *given))


def small(of: Pipelining, cut: Any = None, **changes: Any) -> Any:
    """A trainer of three layers in one process."""
    settings = ImageSettings(batch=13, steps=4, lr=0.5, optimizer="sgd", **changes)
    layers = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))

    class Small(PipelineTrainer):
        steps = 4

        def loss(self, outputs: Any, labels: Any) -> Any:
            return (outputs - labels).sum()

    return Small(settings, torch.nn.Sequential(*layers), cut, of, MPI.COMM_SELF, device="cpu")


PIPED = replace(pipelining(2, "gpipe", "--microbatches", "4"), chunks=2)


def test_a_pipeline_is_made_and_described_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_training, "Pipeline", Recorded)
    asked: list[Any] = []

    def cut(micro_batch: int, replicas: Any) -> list[str]:
        asked.append((micro_batch, replicas))
        return ["2"]

    lines = []
    for of in (
        PIPED,
        replace(PIPED, microbatches=20, replicas=(1, 3), chunks=1),
        replace(PIPED, ppv=(1, 2), microbatches=1, weights="stash", vertical_sync=True),
        replace(PIPED, cuts=("1",), batch_norm="deferred", switch_after=0, schedule="stale"),
        replace(PIPED, cuts=(), replicas=(1,), chunks=1),
    ):
        trainer = small(of, cut)
        (stages, ranks, schedule, loss), named = trainer.pipe.given, trainer.pipe.named
        assert ranks == MPI.COMM_SELF and loss == trainer.loss and trainer.steps_in_flight == of.stages
        lines += [trainer.distribution, f"    {len(stages)} parts, {schedule}, {named}", f"    {trainer.placement}"]
    assert asked == [(3, [1, 1, 1, 1]), (1, [1, 3])]
    assert_approved("pipeline-trainers", "\n".join(lines))
    for changes, text in (
        ({"clip_norm": 1.0}, "--clip-norm: cannot be combined with a pipeline"),
        ({"accumulate": 2}, "--accumulate, --ema: cannot be combined with a pipeline"),
        ({"ema": 0.5}, "--accumulate, --ema: cannot be combined with a pipeline"),
    ):
        with pytest.raises(DistconvError, match=f"^{text}"):
            small(PIPED, cut, **changes)


def test_steps_of_a_pipeline_have_the_scheduled_rate_and_switch_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_training, "Pipeline", Recorded)
    trainer = small(replace(PIPED, cuts=("1",), switch_after=2))
    trainer.model.eval()
    for step in range(4):
        assert trainer.step(torch.tensor([[step, 1.0]]), torch.tensor([step])) == 0.25
    assert trainer.model.training
    rates = [learning_rate(step, 4, 0.5) for step in range(4)]
    assert [call[0] for call in trainer.pipe.calls] == ["step", "step", "switch", "step", "step"]
    assert trainer.pipe.calls[2] == ("switch", "gpipe")
    steps = [call for call in trainer.pipe.calls if call[0] == "step"]
    assert steps == [("step", [[step, 1.0]], [step], pytest.approx(rates[step])) for step in range(4)]
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(rates[3]) and trainer.step_count == 4
    assert trainer.losses == [(step, 0.5) for step in range(1, 5)]
    trainer.pipe.calls.clear()
    trainer.pipe.losses.append((4, 0.75))
    trainer.synchronize()
    trainer.close()
    assert trainer.pipe.calls == [("drain",), ("synchronize",), ("close",)]
    assert trainer.losses[-1] == (5, 0.75)

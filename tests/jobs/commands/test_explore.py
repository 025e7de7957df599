"""``distconv explore``: what it prints, writes and draws; what it writes trains as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI

from distconv import cli
from distconv.jobs.commands import explore
from distconv.jobs.training.model_factory import build_model
from distconv.perfmodel import Layer, Machine, Profile, predicted_profile, trace
from distconv.perfmodel.exploration.candidate_stages import Overheads
from distconv.pipeline import Pipeline, PipelinePlan, SplitError, split
from tests.jobs.command_lines import assert_refused, parsed
from tests.jobs.training.pipelines.pipelined import BY_SHAPES
from tests.pipeline.training import train_plainly

BATCH = 4
SHAPES = {"lenet5": (1, 28, 28), "resnet20": (3, 8, 8), "unet": (3, 16, 16), BY_SHAPES: (3, 8, 8)}
CLASSES = 3


def explore_arguments(path: Path, name: str, ranks: int, *more: str) -> list[str]:
    extents = ",".join(map(str, SHAPES[name]))
    network = ["--model", name, "--width", "2", "--classes", str(CLASSES), "--input", extents, "--batch", str(BATCH)]
    return ["explore", *network, "--ranks", str(ranks), "--machine", "localhost", "--out", str(path), *more]


def reference_network(name: str) -> torch.nn.Module:
    model = build_model(name, MPI.COMM_SELF, seed=0, in_channels=3, classes=CLASSES, width=2)
    return model.double()


def mini_batches(name: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    maps = SHAPES[name][1:] if name == "unet" else ()
    return [
        (
            torch.randn(BATCH, *SHAPES[name], generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (BATCH, *maps), generator=generator),
        )
        for _ in range(count)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


def assert_trains_as_one_process(comm: Any, plan: PipelinePlan | Path, name: str, *, kind: str | None = None) -> None:
    """With the losses of a plain loop over the same micro-batches; nothing in flight is stale or dropped."""
    found = plan if isinstance(plan, PipelinePlan) else PipelinePlan.load(plan, comm)
    data, example = mini_batches(name, 5), torch.empty(2, *SHAPES[name], dtype=torch.float64)
    stages = split(reference_network(name), list(found.cuts), example)
    pipe = Pipeline.from_plan(plan, stages, comm, F.cross_entropy, sgd, kind=kind)
    for batch in data:
        pipe.step(*batch)
    pipe.drain()
    expected = train_plainly([reference_network(name)], data, found.microbatches, F.cross_entropy, sgd)
    assert [loss for _, loss in pipe.losses] == pytest.approx(expected, rel=1e-10)
    pipe.close()


@pytest.mark.long
@pytest.mark.ranks(2, 4)
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(("name", "schedules"), [("unet", "dp,gpipe,1f1b-so"), (BY_SHAPES, "1f1b-sno")])
def test_what_is_chosen_trains_as_one_process_does(comm: Any, shared_tmp_path: Path, name: str, schedules: str) -> None:
    path = shared_tmp_path / "pipeline.json"
    assert cli.main(explore_arguments(path, name, comm.size, "--schedules", schedules)) == 0
    comm.Barrier()
    found = PipelinePlan.load(path, comm)
    assert found.ranks == comm.size and found.model == name and found.batch == BATCH
    assert "dp" in schedules or found.cuts
    assert_trains_as_one_process(comm, path, name)


def test_of_turns_the_fastest_profiles_and_the_medians_of_overheads_count() -> None:
    turns = []
    for small, large, pass_s in ((1.0, 9.0, 0.2), (5.0, 7.0, 0.1), (2.0, 8.0, 0.4)):
        profiles = {size: Profile([Layer("a", 1.0, time, 8, 4)], []) for size, time in ((2, small), (8, large))}
        overheads = Overheads(pass_s, 2 * pass_s, 3 * pass_s, True, 4 * pass_s)
        turns.append(explore.Measurements(Machine.load("localhost"), overheads, profiles))
    found = explore.combine_measurements(turns)
    assert {size: profile.layers[0].backward_s for size, profile in found.profiles.items()} == {2: 1.0, 8: 7.0}
    assert found.overheads == Overheads(0.2, 0.4, pytest.approx(0.6), True, 0.8)


@pytest.mark.parametrize(
    ("kinds", "more", "text"),
    [
        ("", ["--schedules", "fast"], "--schedules fast: no such schedule. Use some of dp, "),
        ("", ["--schedules", "1f1b-as"], "--schedules 1f1b-as: no such schedule. Use some of dp, "),
        ("", ["--schedules", "gpipe", "--memory", "1kB"], "no choice fits into 1000 bytes"),
        ("", ["--machine", "here"], "--ranks is 2 and this job has 1. Start mpiexec -n 2"),
        ("", ["--plot", "picture.xyz"], "--plot picture.xyz: unknown file format"),
        ("", ["--method", "exact"], "--method: only an option of --devices"),
        ("gpu", [], "--devices gpu: the number of ranks of each device type is missing"),
        ("old:1,new:1", [], "there is no kind of device 'old'; all of its devices are of one kind"),
        ("old:1,new:1", ["--profiles", "/nowhere"], "no old.json"),
        ("old:1,new:1", ["--schedules", "dp"], "--schedules: cannot be combined with --devices"),
        ("old:1,new:1", ["--machine", "here"], "--machine here: cannot be combined with --devices"),
    ],
)
def test_what_cannot_be_explored_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: str, more: list[str], text: str
) -> None:
    out = tmp_path / "out.json"
    words = over_kinds(out, "lenet5", kinds, *more) if kinds else explore_arguments(out, "lenet5", 2, *more)
    assert_refused(capsys, words, text)
    assert not out.exists()


def test_a_model_that_cannot_be_split_is_explored_without_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[str]:
        raise SplitError("forward reads a value")

    monkeypatch.setattr(explore, "possible_cuts", refuse)
    out = tmp_path / "plan.json"
    assert cli.main(explore_arguments(out, "lenet5", 2)) == 0
    assert "no stages: forward reads a value" in capsys.readouterr().out
    assert PipelinePlan.load(out, MPI.COMM_SELF).cuts == ()


def test_layers_are_measured_for_each_size_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def measured(machine: Machine, graph: Any, *_: object, **__: object) -> Machine:
        sizes.append(graph.operations[0].x.shape[0])
        return machine

    monkeypatch.setattr(explore, "add_layer_times", measured)
    monkeypatch.setattr(
        explore, "time_layers", lambda model, inputs, **_: SimpleNamespace(profile=SimpleNamespace(layers=[]))
    )
    monkeypatch.setattr(explore, "measured_overheads", lambda *_: Overheads())
    monkeypatch.setattr(explore, "measure_machine", lambda name, network, *_: network)
    command, *words = explore_arguments(Path("plan.json"), "lenet5", 1)
    options = parsed(command, *words)
    explore.measure_once(options, Machine.load("localhost"), MPI.COMM_SELF)
    assert sizes == [BATCH // count for count in explore.microbatch_counts(BATCH, 1)]


# --- Several kinds of devices ---


def over_kinds(path: Path, name: str, kinds: str, *more: str) -> list[str]:
    command = explore_arguments(path, name, 1, "--devices", kinds, *more)
    at = command.index("--ranks")
    return command[:at] + command[at + 2 :]


def kinds_profiles(folder: Path, name: str) -> Path:
    """Layer profiles of two kinds, one of them three times as slow."""
    folder.mkdir(exist_ok=True)
    graph = trace(reference_network(name), (BATCH, *SHAPES[name]))
    fast = predicted_profile(graph, Machine.load("localhost"))
    fast.save(folder / "new.json")
    slower = [replace(a, forward_s=3 * a.forward_s, backward_s=3 * a.backward_s) for a in fast.layers]
    Profile(slower, fast.edges).save(folder / "old.json")
    return folder


@pytest.mark.long
@pytest.mark.ranks(3)
@pytest.mark.time_limit(120)
def test_stages_over_kinds_of_devices_train_as_one_process_does(comm: Any, shared_tmp_path: Path) -> None:
    """The kinds of the ranks are in another order than those of the plan."""
    there, kinds, path = ["old", "new", "new"], "old:1,new:2", shared_tmp_path / "mixed.json"
    profiles = kinds_profiles(shared_tmp_path / "layers", "resnet20") if comm.rank == 0 else shared_tmp_path / "layers"
    more = ["--profiles", str(profiles), "--method", "sparsepipe"]
    assert cli.main(over_kinds(path, "resnet20", kinds, *more)) == 0
    comm.Barrier()
    plan = PipelinePlan.load(path, comm)
    assert sorted(plan.kinds) == sorted(there) and plan.schedule == "pipedream"
    forced = replace(plan, cuts=("layer2.0.conv1",), replicas=(1, 2), plans=(None, None), kinds=tuple(there))
    # Replicas learn from mini-batches of their own in PipeDream's schedule.
    forced = replace(forced, schedule="1f1b-so", microbatches=2)
    assert_trains_as_one_process(comm, forced, "resnet20", kind=there[::-1][comm.rank])

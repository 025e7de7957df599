"""Options of the commands that plan, simulate, measure and make data: what each hands on to what does the work."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distconv.jobs.commands import explore, make_mesh, make_pointcloud, plan, plan_pointcloud, profile, simulate
from distconv.jobs.planning import report
from distconv.jobs.planning.options import trace_network
from distconv.perfmodel import Machine
from distconv.perfmodel.strategy.selection import select
from tests.jobs.command_lines import Line, pairs, parsed
from tests.jobs.planning.planned_files import MACHINE


class Stopped(Exception):
    """Raised in place of the work."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(MACHINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments_of_first_call(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Callable[[], object]) -> Any:
    """Positional and named arguments of the first call of ``module.name``, at which the work stops."""
    calls: list[Any] = []

    def stop(*arguments: Any, **named: Any) -> None:
        calls.append(SimpleNamespace(given=arguments, named=named))
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(module, name, stop)
        with pytest.raises(Stopped):
            act()
    return calls[0]


# --- plan ---

PLAN = pairs(
    [("--method longest-path", {"method": "longest-path"})],
    [("--optimizer-slots 0", {"optimizer_slots": 0}), ("--optimizer-slots 2", {"optimizer_slots": 2})],
    [("--shard-optimizer", {"shard_optimizer": True})],
    [("--memory-model keep-all", {"memory_model": "keep-all"})],
    [("--workspace 3MB", {"workspace": 3e6})],
    [("--batch-norm local", {"batch_norm": "local"})],
    [("--memory 70MB", {"memory": 7e7})],
    [("--classes 7", {"classes": 7})],
    [("--width 3", {"width": 3})],
    [("--ranks 6", {"ranks": 6}), ("--ranks at-most:8", {"ranks": 8})],
    [("--batch 5", {"batch": 5})],
)


@pytest.mark.parametrize("line", PLAN, ids=str)
def test_a_plan_is_for_all_that_the_options_say(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "--model unet --input 18,16,12 --machine ./tiny.yaml --batch 4 --ranks 2".split()
    options = parsed("plan", *needed, *line.words)
    call = arguments_of_first_call(monkeypatch, plan, "select", lambda: plan._plan(options))
    expected = {
        "method": "exact",
        "optimizer_slots": 1,
        "shard_optimizer": False,
        "memory_model": "autograd",
        "workspace": 0.0,
        "batch_norm": "global",
        "memory": 1e9,
        "classes": 1,
        "width": None,
        "ranks": 2,
        "batch": 4,
    } | dict(line.expected)
    graph, machine, ranks = call.given
    width, classes = expected.pop("width"), expected.pop("classes")
    assert (ranks, graph.batch, machine.name) == (expected.pop("ranks"), expected.pop("batch"), "tiny")
    assert tuple(graph.operations[0].x.shape[1:]) == (18, 16, 12) and graph.operations[-1].y.shape[1] == classes
    assert width is None or graph.operations[0].y.shape[1] == width
    assert {name: value for name, value in call.named.items() if name in expected} == expected


def test_a_figure_of_a_plan_is_titled_and_drawn_with_plans_for_fewer_ranks(monkeypatch: Any) -> None:
    words = "--model lenet5 --input 1,28,28 --machine ./tiny.yaml --batch 8 --ranks 4 --memory 70MB --workspace 3MB"
    asked: list[Any] = []

    def strategies(graph: Any, machine: Any, counts: Any, memory: float, method: str, **assumptions: Any) -> Any:
        asked.append((machine.name, list(counts), memory, method, assumptions["workspace"]))
        return {ranks: select(graph, machine, ranks, memory=memory, **assumptions) for ranks in counts}

    monkeypatch.setattr(plan, "select_strategies", strategies)
    options = parsed("plan", *words.split(), "--plot", "plan.png")
    call = arguments_of_first_call(monkeypatch, plan.picture, "draw", lambda: plan._plan(options))
    path, strategy, scaling = call.given
    assert asked == [("tiny", [1, 2], 7e7, "exact", 3e6)]
    assert (path, strategy.plan.ranks, sorted(scaling.curves["planned"])) == (Path("plan.png"), 4, [1, 2, 4])
    assert call.named["memory"] == 7e7
    assert call.named["title"] == "lenet5, 8 samples, on 4 ranks of tiny (exact)"


# --- explore ---

EXPLORE = pairs(
    [("--memory 70MB", {"memory": 7e7})],
    [("--schedules gpipe", {"schedules": ["gpipe"]}), ("--schedules stale,dp", {"schedules": ["stale", "dp"]})],
    [("--ranks 4", {"ranks": 4}), ("--ranks at-most:3", {"ranks": 3})],
    [("--batch 30", {"batch": 30}), ("--batch 40", {"batch": 40})],
)


@pytest.mark.parametrize("line", EXPLORE, ids=str)
def test_an_exploration_is_of_all_that_the_options_say(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "--model lenet5 --input 1,28,28 --machine ./tiny.yaml --batch 8 --ranks 2".split()
    options = parsed("explore", *needed, *line.words)
    call = arguments_of_first_call(monkeypatch, explore, "explore", lambda: explore.run(options))
    expected = {
        "memory": None,
        "schedules": ["dp", "gpipe", "1f1b-sno", "1f1b-so"],
        "ranks": 2,
        "batch": 8,
    } | dict(line.expected)
    graph_of, machine, ranks, batch = call.given
    assert (machine.name, ranks, batch) == ("tiny", expected["ranks"], expected["batch"])
    assert (call.named["memory"], call.named["schedules"]) == (expected["memory"], expected["schedules"])
    assert call.named["microbatches"] == [m for m in range(1, min(batch, 8 * ranks) + 1) if batch % m == 0]
    assert call.named["joint"] is True and graph_of(3).batch == 3


@pytest.mark.parametrize(
    ("more", "method", "memory"),
    [([], "sparsepipe", 1e9), (["--method", "exact"], "exact", 1e9), (["--memory", "7MB"], "sparsepipe", 7e6)],
)
def test_kinds_of_devices_are_cut_for_as_the_options_say(
    more: list[str], method: str, memory: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"old": 1, "new": 2}
    described = Machine.load("./tiny.yaml")
    monkeypatch.setattr(Machine, "of_kind", lambda self, kind: described)
    needed = "--model lenet5 --input 1,28,28 --machine ./tiny.yaml --batch 8 --devices old:1,new:2".split()
    options = parsed("explore", *needed, *more)
    call = arguments_of_first_call(
        monkeypatch, explore.mixed_devices.DeviceMix, "choose_stages", lambda: explore.run(options)
    )
    mixed, *given = call.given
    assert given == [method]
    assert [(each.name, each.count, each.memory) for each in mixed.devices] == [
        (kind, count, memory) for kind, count in kinds.items()
    ]


# --- simulate ---

SIMULATE = pairs(
    [("--forward 1.5", {"forward": 1.5}), ("--forward 1,2,3", {"forward": [1.0, 2.0, 3.0]})],
    [("--backward 2.5", {"backward": 2.5})],
    [("--weight 0.7", {"weight": 0.7})],
    [("--transfer 0.3", {"transfer": 0.3})],
    [("--update 0.4", {"update": 0.4})],
    [("--activation 6", {"activation": 6.0})],
    [("--replicas 2,1,1", {"replicas": [2, 1, 1]}), ("--replicas 2", {"replicas": 2})],
    [("--weights newest", {"weights": "newest"}), ("--weights predict", {"weights": "predict"})],
    [("--switch-after 5", {"switch_after": 5})],
    [("--chunks 2", {"chunks": 2})],
    [("--vertical-sync", {"vertical_sync": True})],
)


@pytest.mark.parametrize("line", SIMULATE, ids=str)
def test_a_simulation_has_the_costs_and_the_schedule_of_the_options(line: Line, monkeypatch: Any) -> None:
    options = parsed("simulate", *"--schedule pipedream --stages 3 --microbatches 8".split(), *line.words)
    made: list[Any] = []
    monkeypatch.setattr(simulate, "schedule", lambda *given, **named: made.append((given, named)) or "schedule")
    call = arguments_of_first_call(monkeypatch, simulate, "simulate", lambda: simulate.run(options))
    costs = {"forward": 1.0, "backward": 2.0, "weight": None, "transfer": 0.0, "update": 0.0, "activation": 1.0}
    names = ("forward", "backward", "weight", "transfer", "update", "activation", "replicas")
    expected = costs | {"replicas": None} | {name: v for name, v in line.expected.items() if name in names}
    of_schedule = {name: value for name, value in line.expected.items() if name not in costs}
    assert dict(zip(("order", *names), call.given, strict=True)) == {"order": "schedule", **expected}
    assert made == [(("pipedream", 3, 8), of_schedule)]


# --- profile ---


def test_a_machine_is_measured_for_one_rank_and_those_of_the_run_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    network = "--out here.yaml --model lenet5 --input 1,28,28 --batch 4".split()
    monkeypatch.setattr(profile, "profile_network", lambda comm, device: None)
    monkeypatch.setattr(profile, "measure_machine", lambda name, *_: name)
    for words, ranks, name in (([], [1, 1], None), (["--ranks", "2,6", "--name", "mine"], [2, 6], "mine")):
        options = parsed("profile", *network, *words)
        call = arguments_of_first_call(
            monkeypatch, profile, "add_layer_times", lambda options=options: profile.run(options)
        )
        machine, graph, counts = call.given[:3]
        assert (counts, graph.batch) == (ranks, 4)
        assert machine == (name or options.name)


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--warmup 0", {"warm_up": 0}), ("--warmup 2", {"warm_up": 2})],
        [("--iterations 3", {"iterations": 3})],
        [("--batch 5", {"batch": 5})],
        [("--width 4", {"width": 4})],
        [("--classes 7", {"classes": 7})],
        [("--input 3,40,36", {"input": (3, 40, 36)})],
    ),
    ids=str,
)
def test_layers_are_timed_as_the_options_say(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed("profile", "--layers", "--model", "resnet20", *line.words)
    call = arguments_of_first_call(monkeypatch, profile, "time_layers", lambda: profile.run(options))
    expected = {"warm_up": 50, "iterations": 100, "batch": 32, "classes": 10, "input": (3, 32, 32), "width": 16}
    expected |= dict(line.expected)
    model, (x,), warm_up, iterations = call.given
    assert (warm_up, iterations) == (expected["warm_up"], expected["iterations"])
    assert tuple(x.shape) == (expected["batch"], *expected["input"])
    assert model.fc.out_features == expected["classes"] and model.conv1.out_channels == expected["width"]


# --- sparse networks, and data ---


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--width 3", {"width": 3})],
        [("--batch 3", {"batch": 3})],
        [("--resolution 12", {"resolution": 12})],
        [("--points 50", {"points": 50})],
        [("--keep 0.5", {"keep": 0.5})],
        [("--varied", {"varied": True})],
        [("--memory 7MB", {"memory": 7e6})],
        [("--model vgg16_bn", {"model": "vgg16_bn"})],
    ),
    ids=str,
)
def test_grids_of_a_sparse_network_are_for_the_voxels_of_the_options(line: Line, monkeypatch: Any) -> None:
    options = parsed("plan pointcloud", "--ranks", "3", "--machine", "./tiny.yaml", *line.words)
    expected = {
        "width": 8,
        "batch": 16,
        "resolution": 32,
        "points": 1024,
        "keep": 1.0,
        "varied": False,
        "model": "resnet",
    }
    expected |= {"memory": 1e9} | dict(line.expected)
    recipes: list[Any] = []
    clouds = SimpleNamespace(groups={"train": SimpleNamespace(labels=range(100))}, close=lambda: None)
    monkeypatch.setattr(plan_pointcloud, "CloudSamples", lambda path, comm: clouds)
    sample = SimpleNamespace(coords=None, features=None, labels=range(expected["batch"]))
    monkeypatch.setattr(plan_pointcloud, "voxel_batch", lambda *given, epoch: recipes.append(given) or sample)
    monkeypatch.setattr(plan_pointcloud, "SparseTensor", lambda *_, batch_size: batch_size)
    monkeypatch.setattr(plan_pointcloud, "build_network", lambda settings, samples: settings)
    monkeypatch.setattr(plan_pointcloud, "record", lambda network, x: (network, x))
    call = arguments_of_first_call(monkeypatch, plan_pointcloud, "select_grid", lambda: plan_pointcloud.run(options))
    (settings, size), machine, ranks, memory = call.given
    (_, chosen, recipe), *_ = recipes
    assert (machine.name, ranks, memory, call.named) == ("tiny", 3, expected["memory"], {"optimizer_slots": 2})
    assert (settings.width, settings.model, size) == (expected["width"], expected["model"], expected["batch"])
    assert list(chosen) == list(range(expected["batch"]))
    found = asdict(recipe)
    names = ("resolution", "points", "keep", "varied")
    assert [found[name] for name in names] == [expected[name] for name in names]


@pytest.mark.parametrize(
    ("model", "sample", "task"), [("resnet20", "3,32,32", "classify"), ("unet3d", "3,16,16,16", "segmentation")]
)
def test_a_plan_is_given_to_training_of_the_same_network(model: str, sample: str, task: str) -> None:
    words = f"--model {model} --width 4 --classes 7 --input {sample} --batch 6 --machine x --ranks 2 --out p.json"
    options = parsed("plan", *words.split())
    command = report.training_command(Namespace(**vars(options) | {"ranks": 2}), trace_network(options))
    given = parsed(f"train {task}", *command.split(f"mpiexec -n 2 distconv train {task} ")[1].split())
    assert (given.model, given.width, given.classes, given.batch, given.plan) == (model, 4, 7, 6, "p.json")
    if task == "classify":
        options = parsed("explore", *words.split())
        command = explore._training_command(Namespace(**vars(options) | {"ranks": 2}))
        given = parsed("train classify", *command.split("mpiexec -n 2 distconv train classify ")[1].split())
        assert (given.model, given.width, given.classes, given.batch) == (model, 4, 7, 6)
        assert given.pipeline_plan == "p.json"
    else:
        assert explore._training_command(options) == "distconv.pipeline.Pipeline.from_plan('p.json', ...)"


def test_a_grid_is_given_to_training_with_all_that_it_was_chosen_for() -> None:
    words = "--data x.h5 --model vgg16_bn --width 3 --batch 5 --resolution 12 --points 50 --keep 0.5 --varied"
    options = parsed("plan pointcloud", "--ranks", "2", "--machine", "localhost", *words.split())
    again = parsed("train pointcloud", *plan_pointcloud._settings(options).split())
    for name in ("data", "model", "width", "batch", "resolution", "points", "keep", "varied"):
        assert getattr(again, name) == getattr(options, name), name


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--size 32", {"size": 32})],
        [("--samples 5", {"samples": 5})],
        [("--heldout 0", {"heldout": 0}), ("--heldout 9", {"heldout": 9})],
        [("--seed 4", {"seed": 4})],
        [("--tau 0.3", {"tau": 0.3})],
        [("--threshold 0.2", {"threshold": 0.2})],
    ),
    ids=str,
)
def test_mesh_samples_are_made_as_the_options_say(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed("data mesh", "--out", "new/mesh.h5", *line.words)
    call = arguments_of_first_call(monkeypatch, make_mesh.dataset, "generate", lambda: make_mesh.run(options))
    tau = parsed("data mesh").tau
    expected = {"size": 128, "samples": 48, "heldout": None, "seed": 0, "tau": tau, "threshold": 0.4}
    call.named.pop("comm")
    assert callable(call.named.pop("on_first_sample"))
    assert call.given == (Path("new/mesh.h5"),) and call.named == expected | dict(line.expected)


@pytest.mark.parametrize(
    "line",
    pairs(
        [("--samples 12", {"samples": 12})],
        [("--heldout 0", {"heldout": 0}), ("--heldout 9", {"heldout": 9})],
        [("--seed 4", {"seed": 4})],
        [("--points 30", {"points": 30})],
    ),
    ids=str,
)
def test_clouds_are_made_as_the_options_say(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed("data pointcloud", "--out", "c.h5", *line.words)
    made: list[Any] = []
    monkeypatch.setattr(
        make_pointcloud, "Shapes", lambda count, points, *, seed, group=0: made.append((group, count, points, seed))
    )
    call = arguments_of_first_call(monkeypatch, make_pointcloud, "write_clouds", lambda: make_pointcloud.run(options))
    points = parsed("data pointcloud").points
    expected = {"samples": 1000, "seed": 0, "points": points} | dict(line.expected)
    heldout = expected.get("heldout", expected["samples"] // 5)
    groups = {0: expected["samples"]} | ({1: heldout} if heldout else {})
    assert made == [(group, count, expected["points"], expected["seed"]) for group, count in groups.items()]
    assert call.given[0] == Path("c.h5") and list(call.given[1]) == ["train", "test"][: len(groups)]
    assert call.named["source"] == (
        f"shapes ({expected['samples']} train, {heldout} test), {expected['points']} points each, seed "
        f"{expected['seed']}"
    )


def test_a_device_of_layers_is_the_one_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "select_device", lambda name, comm: name)
    options = parsed("profile", "--layers", "--model", "lenet5", "--device", "cpu")
    call = arguments_of_first_call(monkeypatch, profile, "_time_network", lambda: profile.run(options))
    assert call.given[1] == torch.device("cpu")

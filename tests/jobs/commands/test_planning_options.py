"""Options of the commands that plan, simulate, measure and make data: what each hands on to what does the work."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
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
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import noting, on_any_machine, parsed
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


HANDED_ON: dict[str, tuple[str, Callable[[Namespace], object], Sequence[tuple[Any, str, Any]], Sequence[str]]] = {
    "plan": (
        "--model unet --input 18,16,12 --machine ./tiny.yaml --batch 4 --ranks 2",
        plan._plan,
        [(plan, "select", Stopped())],
        ["--method longest-path", "--optimizer-slots 0", "--shard-optimizer", "--memory-model keep-all",
         "--workspace 3MB", "--batch-norm local", "--memory 70MB", "--classes 7", "--width 3", "--ranks 6",
         "--ranks at-most:8", "--batch 5"],
    ),
    "explore": (
        "--model lenet5 --input 1,28,28 --machine ./tiny.yaml --batch 8 --ranks 2",
        explore.run,
        [(explore, "explore", Stopped())],
        ["--memory 70MB", "--schedules stale,dp", "--ranks 4", "--ranks at-most:3", "--batch 30", "--batch 40"],
    ),
    "simulate": (
        "--schedule pipedream --stages 3 --microbatches 8",
        simulate.run,
        [(simulate, "schedule", "a schedule"), (simulate, "simulate", Stopped())],
        ["--forward 1.5", "--forward 1,2,3", "--backward 2.5", "--weight 0.7", "--transfer 0.3", "--update 0.4",
         "--activation 6", "--replicas 2,1,1", "--replicas 2", "--weights newest", "--switch-after 5", "--chunks 2",
         "--vertical-sync"],
    ),
    "data mesh": (
        "--out new/mesh.h5",
        make_mesh.run,
        [(make_mesh.dataset, "generate", Stopped())],
        ["--size 32", "--samples 5", "--heldout 0", "--heldout 9", "--seed 4", "--tau 0.3", "--threshold 0.2"],
    ),
    "data pointcloud": (
        "--out c.h5",
        make_pointcloud.run,
        [(make_pointcloud, "Shapes", "shapes"), (make_pointcloud, "write_clouds", Stopped())],
        ["--samples 12", "--heldout 0", "--heldout 9", "--seed 4", "--points 30"],
    ),
    "plan pointcloud": (
        "--ranks 3 --machine ./tiny.yaml",
        plan_pointcloud.run,
        [
            (plan_pointcloud, "CloudSamples",
             SimpleNamespace(groups={"train": SimpleNamespace(labels=range(100))}, close=lambda: None)),
            (plan_pointcloud, "voxel_batch", SimpleNamespace(coords=None, features=None, labels=range(7))),
            (plan_pointcloud, "SparseTensor", "voxels"),
            (plan_pointcloud, "build_network", "network"),
            (plan_pointcloud, "record", "recorded"),
            (plan_pointcloud, "select_grid", Stopped()),
        ],
        ["--width 3", "--batch 3", "--resolution 12", "--points 50", "--keep 0.5", "--varied", "--memory 7MB",
         "--model vgg16_bn"],
    ),
}  # fmt: skip
"""For each command: words that it needs, what runs it, functions that are called, with their results, and options."""


@pytest.mark.parametrize("command", HANDED_ON)
def test_what_is_handed_on_for_each_option_is_as_approved(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed, run, functions, options = HANDED_ON[command]
    lines: list[str] = []
    for words in ("", *options):
        lines.append(f"{command} {words}")
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            for module, name, result in functions:
                patch.setattr(module, name, noting(lines, name, result))
            run(parsed(command, *needed.split(), *words.split()))
    assert_approved(f"handed-on/{command.replace(' ', '-')}", on_any_machine("\n".join(lines)))


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


def test_a_device_of_layers_is_the_one_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "select_device", lambda name, comm: name)
    options = parsed("profile", "--layers", "--model", "lenet5", "--device", "cpu")
    call = arguments_of_first_call(monkeypatch, profile, "_time_network", lambda: profile.run(options))
    assert call.given[1] == torch.device("cpu")

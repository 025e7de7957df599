"""All that commands print about a machine that is described: approved as a whole."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from distconv import cli
from distconv.jobs.commands import profile
from distconv.perfmodel import Layer, Machine, Profile
from distconv.perfmodel.machine.links import Link
from distconv.perfmodel.machine.measure_links import LinkProfile as Links
from distconv.perfmodel.machine.measure_links import NetworkProfile
from distconv.perfmodel.profiles.layer_timing import Timing
from tests.jobs.approved import assert_approved
from tests.jobs.planning.planned_files import MACHINE

SMALL = "--input 1,28,28 --batch 8 --machine ./tiny.yaml"
UNET = "--model unet --width 4 --input 18,16,12 --batch 4 --machine ./tiny.yaml"

COMMANDS = {
    "plan": f"plan --model lenet5 {SMALL} --ranks 4 --layers --out plan.json",
    "plan-unet": f"plan {UNET} --ranks 4 --memory 70MB --method longest-path --optimizer-slots 2 --shard-optimizer "
    "--workspace 3MB --batch-norm local --layers --out plan.json",
    "plan-fewer": f"plan --model lenet5 {SMALL} --machine ./slow.yaml --ranks 4 --memory-model keep-all",
    "plan-at-most": f"plan --model lenet5 {SMALL} --machine ./slow.yaml --ranks at-most:4 --out plan.json",
    "plan-hours": f"plan --model lenet5 {SMALL} --machine ./slowest.yaml --ranks 2 --layers",
    "plan-odd": "plan --model lenet5 --input 1,28,28 --batch 2 --machine ./tiny.yaml --ranks 3",
    "plan-measured": f"plan --model lenet5 {SMALL} --machine ./measured.yaml --ranks 2",
    "explore": f"explore --model lenet5 {SMALL} --ranks 2 --schedules dp,gpipe,1f1b-so,pipedream --out pipeline.json "
    "--plot pipeline.png",
    "explore-memory": f"explore --model lenet5 {SMALL} --ranks 4 --memory 0.75MB --width 8 "
    "--schedules dp,gpipe,1f1b-sno",
    "explore-fewer": f"explore --model lenet5 {SMALL} --machine ./slow.yaml --ranks 2 --schedules dp,gpipe",
    "explore-kinds": f"explore --model lenet5 {SMALL} --devices old:1,new:2 --profiles layers --out mixed.json",
    "simulate": "simulate --schedule 1f1b-so --stages 3 --microbatches 8 --transfer 0.5 --update 1",
    "simulate-replicas": "simulate --schedule pipedream --stages 2 --microbatches 24 --replicas 2,1 --forward 2,1 "
    "--backward 4,2 --activation 3",
    "simulate-weight": "simulate --schedule 1f1b-sno --stages 2 --microbatches 3 --backward 1 --weight 1.25 "
    "--trace trace.json --plot steps.png",
    "simulate-chunks": "simulate --schedule interleaved --stages 2 --microbatches 4 --chunks 2",
    "plan-pointcloud": "plan pointcloud --batch 4 --points 64 --width 2 --resolution 16 --keep 0.5 --ranks 2 "
    "--machine localhost --memory 0.7MB",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(MACHINE)
    (tmp_path / "slow.yaml").write_text(MACHINE.replace("latency: 1 ns", "latency: 1 s"))
    hours = MACHINE.replace("1 GFLOP/s", "1 MFLOP/s").replace("1 GB/s", "1 kB/s")
    (tmp_path / "slowest.yaml").write_text(hours)
    (tmp_path / "layers").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_measured() -> None:
    """A machine on which one layer of several was measured, and profiles of two kinds of devices."""
    table = {"conv2d 4x1x28x28 6x1x5x5 stride 1 padding 2 groups 1 forward": 1e-3}
    machine = Machine.load("./tiny.yaml")
    replace(machine, compute=(replace(machine.compute[0], table=table),)).save(Path("measured.yaml"))
    names = ("c1", "c3", "c5", "f6", "output")
    for kind, factor in (("old", 3.0), ("new", 1.0)):
        layers = [Layer(name, factor * 1e-3, factor * 2e-3, 4000, 800 * i) for i, name in enumerate(names, 1)]
        Profile(layers).save(Path("layers") / f"{kind}.json")


LAYERS = [Layer("c1", 1e-3, 2.5e-3, 4000, 900), Layer("f6", 4e-4, 6e-4, 1500, 70000)]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_printed_text_and_the_written_files_are_the_approved_ones(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured()
    assert cli.main(shlex.split(COMMANDS[name])) == 0
    files = [f"{path.name}: {' '.join(path.read_text().split())}" for path in sorted(folder.glob("*.json"))]
    assert_approved(name, "\n".join([capsys.readouterr().out.rstrip(), *files]))
    for picture in [word for word in COMMANDS[name].split() if word.endswith(".png")]:
        assert (folder / picture).read_bytes()[:4] == b"\x89PNG"


def test_measured_layers_and_links_are_printed_as_approved(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    profile._print_layers(Timing(Profile(LAYERS), 5e-3))
    machine = replace(Machine.load("./tiny.yaml"), node=Link(2e-6, 3e9), network=Link(5e-6, 7e9))
    near, far = Links(Link(2e-6, 3e9), Link(9e-6, 4e9)), Links(Link(5e-6, 7e9), Link(2e-5, 6e9))
    profile._save(machine, NetworkProfile(near, far), 3, Path("here.yaml"))
    profile._save(machine, NetworkProfile(near, None), 1, Path("one-node.yaml"))
    profile._save(machine, None, 1, Path("known.yaml"))
    options = argparse.Namespace(out=folder)
    twice = [Layer(each.name, 3 * each.forward_s, each.backward_s, 4000, 900) for each in LAYERS]
    every = [("old", Timing(Profile(LAYERS), 5e-3)), ("new", Timing(Profile(LAYERS), 4e-3))]
    profile._save_kinds([*every, ("old", Timing(Profile(twice), 8e-3))], options)
    assert_approved("profile", capsys.readouterr().out.replace(str(folder), "FOLDER"))
    for name in ("here", "one-node", "known"):
        assert Machine.load(f"./{name}.yaml") == machine

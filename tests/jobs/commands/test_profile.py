"""``distconv profile``: a machine file that plans are made with, and that is added to, not measured again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mpi4py import MPI

from distconv.cli import main
from distconv.errors import DistconvError
from distconv.jobs.commands import profile
from distconv.layers.models import MODELS
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.links import Link
from distconv.perfmodel.machine.machine import Compute, Machine, Overlap, Roofline
from distconv.perfmodel.machine.measure_links import LinkProfile, NetworkProfile
from distconv.perfmodel.machine.step_mode import StepMode
from distconv.perfmodel.profiles import layer_timing
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import assert_refused, parsed
from tests.jobs.verification.pretended import two_ranks

LENET = ["--model", "lenet5", "--input", "1,28,28", "--batch", "8"]


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.time_limit(120)
def test_a_profile_is_a_machine_and_what_is_known_is_not_measured_again(comm, tmp_path_factory):
    path = comm.bcast(tmp_path_factory.mktemp("profile") / "here.yaml" if comm.rank == 0 else None)
    assert main(["profile", "--out", str(path), *LENET]) == 0
    found = Machine.load(path)
    assert [entry.busy for entry in found.compute] == sorted({1, comm.size})
    assert found.ranks_per_node == comm.size and not found.overlap.halo
    assert any(key.startswith("conv2d 8x1x28x28") for key in found.compute[0].table)
    assert any(key.startswith("conv2d 4x1x28x28") for key in found.compute[1].table)
    comm.Barrier()
    assert main(["profile", "--out", str(path), *LENET]) == 0
    assert Machine.load(path) == found


@pytest.mark.ranks(4)
def test_layers_for_part_of_a_node_are_measured_where_predictions_look_them_up(comm):
    """For 2 of a node's 4 ranks that is the table of one rank at work, the last one that is not busier."""
    roofline = Roofline(1e9, 1e9, 1e-6)
    machine = replace(Machine.load("localhost"), ranks_per_node=4, compute=(Compute(1, roofline), Compute(4, roofline)))
    graph = trace(MODELS["lenet5"](), (8, 1, 28, 28))
    found = profile.add_layer_times(machine, graph, [2], comm, torch.device("cpu"))
    assert any(key.startswith("conv2d 4x1x28x28") for key in found.computing(2).table)
    assert not found.compute[1].table


@pytest.mark.ranks(2)
def test_a_distribution_that_no_search_looks_at_is_measured_if_it_is_named(comm):
    """One channel over two ranks is of no use, but a plan may say so; otherwise its time would be the roofline's."""
    roofline = Roofline(1e9, 1e9, 1e-6)
    machine = replace(Machine.load("localhost"), ranks_per_node=2, compute=(Compute(1, roofline), Compute(2, roofline)))
    graph = trace(MODELS["lenet5"](), (8, 1, 28, 28))
    first = graph.by_layer["c1"][0]
    key = f"{local_call(first, AxisParts.from_axes({'c': 2}, 2, 2)).key} forward"
    for more, there in ([], False), ([{"c": 2}], True):
        found = profile.add_layer_times(
            machine, graph, [1, 2], comm, torch.device("cpu"), rounds=1, extra_candidates=more
        )
        assert (key in found.computing(2).table) is there
        assert key not in found.computing(1).table


@pytest.mark.ranks(2)
def test_a_file_that_is_no_machine_is_not_written_over(comm, shared_tmp_path, capsys):
    path = shared_tmp_path / "notes.yaml"
    if comm.rank == 0:
        path.write_text("shopping: [milk]\n")
    comm.Barrier()
    assert_refused(capsys, ["profile", "--out", str(path)], "notes.yaml")
    assert path.read_text() == "shopping: [milk]\n"


def test_layers_of_a_known_network_need_no_more_than_its_name(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--model", "lenet5", "--layers", "--warmup", "0", "--iterations", "1"]) == 0
    assert [layer.name for layer in Profile.load("lenet5-layers.json").layers] == ["c1", "c3", "c5", "f6", "output"]
    assert "full step without hooks" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layers"], "--layers: --model is missing"),
        (
            ["--layers", "--model", "sparse_resnet", "--input", "1,8,8,9"],
            "the voxels of a cloud must form a cube. Use --input",
        ),
        (["--layers", "--model", "collections:Counter"], "the sample shape of collections:Counter is unknown"),
        (["--layers", *LENET, "--warmup", "-1"], "argument --warmup: '-1' is not a non-negative integer"),
        (["--layers", *LENET, "--ranks", "2"], "--ranks: only an option of machine files"),
        (["--layers", *LENET, "--out", "/nowhere/at/all.json"], "no such folder"),
        (["--layers", *LENET, "--devices", "old:1"], "--devices: --out is missing"),
        (["--layers", *LENET, "--devices", "old:2", "--out", "x"], "2 ranks are counted, but there are 1"),
        (["--layers", *LENET, "--devices", "old"], "'old' is not a kind of device"),
        (["--out", "here.yaml", "--devices", "old:1"], "--devices: only an option of --layers"),
        (["--out", "here.yaml", "--model", "lenet5"], "--model: needs --input"),
        ([], "--out: missing"),
        (["--out", "here.yaml", "--iterations", "3"], "--warmup, --iterations: only options of --layers"),
        (
            ["--out", "here.yaml", "--ranks", "2"],
            "--ranks: only an option of a network's layers. Name the network with --model",
        ),
        (
            ["--out", "here.yaml", "--batch", "2"],
            "--batch: only an option of a network's layers. Name the network with --model",
        ),
    ],
)
def test_impossible_layer_profiles_end_with_one_line(arguments, text, capsys):
    assert_refused(capsys, ["profile", *arguments], text)


@pytest.mark.ranks(2)
def test_layers_are_timed_in_one_process_only(comm, capsys):
    assert_refused(capsys, ["profile", "--layers", *LENET], "this job has 2 ranks")


@pytest.mark.ranks(3)
def test_a_profile_of_each_kind_of_device_is_the_mean_of_its_ranks(comm, shared_tmp_path, monkeypatch, capfd):
    def timed(model, inputs, warm_up, iterations):
        return layer_timing.Timing(Profile([Layer("a", 1.0 + comm.rank, 2.0, 8, 4)]), 3.0 + comm.rank)

    monkeypatch.setattr(profile, "time_layers", timed)
    out = shared_tmp_path / "layers"
    assert main(["profile", "--layers", *LENET, "--devices", "old:1,new:2", "--out", str(out)]) == 0
    comm.Barrier()
    assert Profile.load(out / "old.json").layers == (Layer("a", 1.0, 2.0, 8, 4),)
    assert Profile.load(out / "new.json").layers == (Layer("a", 2.5, 2.0, 8, 4),)
    if comm.rank == 0:
        assert "new.json: 1 layers, 4500.000 ms in all, the mean of 2 ranks" in capfd.readouterr().out


def test_of_several_profiles_the_shortest_times_and_the_medians_of_rates_count():
    profiles = []
    for kernel, time in ((3.0, 5.0), (1.0, 9.0), (2.0, 2.0)):
        entry = Compute(1, Roofline(2e10, 4e9, kernel), {"a": time, f"only {time}": 1.0})
        profiles.append(replace(Machine.load("localhost"), compute=(entry,)))
    (entry,) = profile.combine_machines(profiles).compute
    assert (entry.table, entry.roofline.kernel_s) == ({"a": 2.0}, 2.0)


def test_a_mode_of_steps_is_measured_once_and_has_times_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(profile, "run_on_first_ranks", lambda comm, count, action: action())
    monkeypatch.setattr(profile, "measure_roofline", lambda comm, device, mode: asked.append(mode) or Roofline(1, 2, 3))
    machine, mode, cpu = Machine.load("localhost"), StepMode("channels_last", captured=True), torch.device("cpu")
    machine = replace(machine, ranks_per_node=1, compute=machine.compute[:1])
    assert profile.measure_mode(machine, StepMode(), MPI.COMM_SELF, cpu) is machine
    found = profile.measure_mode(machine, mode, MPI.COMM_SELF, cpu)
    assert found == machine.with_mode(mode, (Compute(1, Roofline(1, 2, 3)),))
    assert profile.measure_mode(found, mode, MPI.COMM_SELF, cpu) is found and asked == [mode]
    graph = trace(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)), (1, 1, 2, 2))
    monkeypatch.setattr(profile, "measure", lambda calls, comm, **options: {f"{key}!": 0.5 for key in calls})
    timed = profile.add_layer_times(found, graph, [1], MPI.COMM_SELF, cpu, mode=mode)
    assert timed.compute == machine.compute
    (entry,) = timed.in_mode(mode).compute
    assert list(entry.table.values()) == [0.5]
    other = timed.with_mode(mode, (replace(entry, table={key: 0.25 for key in entry.table}),))
    (entry,) = profile.combine_machines([timed, other]).in_mode(mode).compute
    assert list(entry.table.values()) == [0.25]


def link(latency: float) -> Link:
    return Link(latency, 1e9 / latency / 1e6)


def test_a_machine_has_the_measured_links_and_rooflines_alone_and_of_all_ranks(monkeypatch):
    monkeypatch.setattr(profile, "node_indices", lambda comm: [0, 0, 0, 1])
    monkeypatch.setattr(profile, "run_on_first_ranks", lambda comm, count, action: action())
    monkeypatch.setattr(profile, "measure_roofline", lambda comm, device, mode: Roofline(1e9 * comm.size, 2e9, 3e-6))
    monkeypatch.setattr(profile, "measure_exchange", lambda comm, device, mode: 4e-6 * comm.size)
    monkeypatch.setattr(profile, "measure_sum", lambda comm, device, mode: 5e-6 * comm.size)
    monkeypatch.setattr(profile.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 3000}.get)
    near, far, cpu = LinkProfile(link(1e-6), link(2e-6)), LinkProfile(link(3e-6), link(4e-6)), torch.device("cpu")
    found = profile.measure_machine("here", NetworkProfile(near, far), two_ranks(), cpu)
    alone, both = Roofline(1e9, 2e9, 3e-6), Roofline(2e9, 2e9, 3e-6, exchange_s=8e-6, gradient_s=10e-6)
    assert found == Machine(
        "here", 3, 4096e3, near.exchange, far.exchange, Overlap(False, False), (Compute(1, alone), Compute(3, both))
    )
    for network, links in (
        (NetworkProfile(near, None), [near.exchange] * 2),
        (NetworkProfile(None, far), [far.exchange] * 2),
        (NetworkProfile(None, None), [Link(1e-6, 1e10)] * 2),
    ):
        found = profile.measure_machine("here", network, two_ranks(), cpu)
        assert [found.node, found.network] == links
    monkeypatch.setattr(profile, "node_indices", lambda comm: [0, 1])
    assert [entry.busy for entry in profile.measure_machine("here", network, two_ranks(), cpu).compute] == [1]


def test_layers_are_timed_with_the_shapes_and_steps_of_the_options(monkeypatch):
    timed = []
    monkeypatch.setattr(profile, "time_layers", lambda model, inputs, *steps: timed.append((model, inputs[0], steps)))
    cpu, own = torch.device("cpu"), ["--warmup", "0", "--iterations", "4", "--batch", "3"]
    lines = []
    for words in (
        ["--model", "lenet5"],
        ["--model", "lenet5", "--input", "1,30,28", "--classes", "7", *own],
        ["--model", "sparse_resnet", "--width", "2", "--classes", "7", "--input", "1,16,16,16", *own],
    ):
        _, text = profile._time_network(parsed("profile", "--layers", *words), cpu)
        model, x, steps = timed[-1]
        *_, last = (each for each in model.parameters())
        lines.append(f"{text} {list(x.shape)} {steps}, {sum(map(torch.numel, model.parameters()))}, {last.numel()}")
    assert_approved("profile-networks", "\n".join(lines))
    options = parsed("profile", "--layers", "--model", "sparse_resnet")
    assert profile._sample_shape(options) == (1, 32, 32, 32)
    options.model = "unknown"
    with pytest.raises(DistconvError, match=r"^--layers: no such model \('unknown'\). Use one of .*sparse_resnet"):
        profile._sample_shape(options)
    for shape in ((2, 8, 8, 8), (1, 8, 8), (1, 8, 9, 8)):
        options.model, options.input = "sparse_resnet", shape
        with pytest.raises(DistconvError, match=f"^--input {','.join(map(str, shape))}: the voxels"):
            profile._sample_shape(options)

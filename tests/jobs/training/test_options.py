"""Options of all training jobs: what is read, what is refused, and the grid of a run that names none."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import distconv as dc
from distconv.jobs.training import options
from distconv.jobs.training.settings import TrainingSettings
from tests.distconv.layouts import raises_everywhere
from tests.jobs.command_lines import option_tests


@pytest.mark.parametrize(
    ("read", "right", "wrong"),
    [
        (options.positive_int, {"1": 1, "12": 12}, ["0", "-1", "1.5", "", "x"]),
        (options.nonnegative_int, {"0": 0, "7": 7}, ["-1", "1.0"]),
        (options.positive_float, {"0.5": 0.5, "1e-3": 1e-3}, ["0", "-1", "nan", "inf", "x"]),
        (options.nonnegative_float, {"0": 0.0, "2": 2.0}, ["-0.1", "nan", "inf"]),
        (options.fraction, {"0": 0.0, "1": 1.0, "0.5": 0.5}, ["-0.1", "1.01", "nan"]),
        (options.fraction_below_one, {"0": 0.0, "0.99": 0.99}, ["-0.1", "1", "inf"]),
        (options.step_range, {"1:2": range(1, 2), "10:13": range(10, 13)}, ["0:2", "2:2", "3:2", "1", "a:2", "1:b"]),
        (options.grid_shape, {"n=2,h=2": {"n": 2, "h": 2}}, ["h=0", "x=2", ""]),
    ],
)
def test_a_value_is_read_or_refused(read, right, wrong) -> None:
    for text, value in right.items():
        assert read(text) == value
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match="is not"):
            read(text)


@dataclass(frozen=True)
class More(TrainingSettings):
    """Settings of a job of its own."""

    colour: str = "red"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_training_arguments(parser, More("lenet5", batch=8, lr=0.25), "runs/x")
    return parser.parse_args([*arguments])


def test_ranks_divide_the_parts_of_a_batch_and_the_others_an_axis() -> None:
    assert options.default_grid(6, 4) == {"n": 2, "h": 3}
    assert options.default_grid(6, 5, "w") == {"n": 1, "w": 6}
    assert options.default_grid(6, 12, "d") == {"n": 6, "d": 1}
    seen: list[object] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(options, "ProcessGrid", lambda comm, **axes: seen.append((comm.size, axes)))
        comm = SimpleNamespace(size=4)
        for words in (["--accumulate", "4"], ["--batch", "3", "--accumulate", "8"], ["--grid", "w=4"]):
            options.parallelism_from_options(parsed(*words), comm, "d")  # type: ignore[arg-type]
    assert seen == [(4, {"n": 2, "d": 2}), (4, {"n": 1, "d": 4}), (4, {"w": 4})]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("given", "expected"), [(None, "local"), ("spatial", "spatial"), ("global", "global")])
def test_batch_norm_is_the_plans_where_the_options_say_nothing(comm, shared_tmp_path, given, expected) -> None:
    if comm.rank == 0:
        dc.Plan({"*": {"h": comm.size}}, batch_norm="local").save(shared_tmp_path / "plan.json")
    comm.Barrier()
    found = parsed("--plan", str(shared_tmp_path / "plan.json"), *(["--batch-norm", given] if given else []))
    found.model, found.colour = "lenet5", "blue"
    options.parallelism_from_options(found, comm)
    assert options.settings_from_options(found, More).batch_norm == expected
    without = parsed("--grid", f"h={comm.size}")
    without.model, without.colour = "lenet5", "blue"
    options.parallelism_from_options(without, comm)
    assert options.settings_from_options(without, More).batch_norm == "global"


@pytest.mark.fault(99)
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the package's CPU build")
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_on_all_ranks(comm, name) -> None:
    assert options.select_device("cpu", comm) == options.select_device(None, comm) == "cpu"
    refused = f"^--device {name}: this machine has no CUDA device; use --device cpu"
    raises_everywhere(comm, dc.GridError, refused, lambda: options.select_device(name, comm))


@pytest.mark.fault(99)
@pytest.mark.ranks(2)
def test_a_gpu_beyond_those_of_one_machine_is_refused_on_all_ranks(comm, monkeypatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4 - comm.rank)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    refused = r"^--device cuda:3: the last GPU of this machine is cuda:2; use --device cuda \(on rank 1\)"
    raises_everywhere(comm, dc.GridError, refused, lambda: options.select_device("cuda:3", comm))
    current.clear()
    assert options.select_device("cuda:2", comm) == "cuda:2"
    assert current == [torch.device("cuda", 2)]
    monkeypatch.setattr(options, "device", lambda: torch.device("cuda", comm.rank))
    assert options.select_device("cuda", comm) == options.select_device(None, comm) == f"cuda:{comm.rank}"


@pytest.mark.fault(99)
@pytest.mark.parametrize("name", ["meta", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", ""])
def test_what_names_no_device_is_refused_before_anything_runs(name, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--device", name)
    assert ended.value.code == 2
    assert f"argument --device: {name!r} is not cpu, cuda or cuda:N" in capsys.readouterr().err


test_options_are_the_approved_ones, _ = option_tests("train classify", "train pointcloud", "train mesh")

"""Options of ``distconv predict``: the grid, the numbers' type, the windows and the scores that they come to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI

from distconv.errors import GridError
from distconv.jobs.commands import predict
from distconv.jobs.prediction.network import TrainedNetwork
from distconv.jobs.prediction.samples import PredictionRun
from tests.jobs.command_lines import Line, pairs, parsed


@pytest.mark.parametrize(("shape", "axis"), [((5, 2, 90), "w"), ((5, 2, 9, 8), "h"), ((5, 2, 7, 9, 8), "h")])
@pytest.mark.parametrize(
    "line",
    pairs(
        [("--grid n=2,w=3", {"grid": {"n": 2, "w": 3}})],
        [("--dtype float32", {"dtype": torch.float32}), ("--dtype float64", {"dtype": torch.float64})],
        [("--raw", {"scores": None})],
        [("--device cpu", {"device": "cpu"})],
        [("--batch 3", {"batch": 3})],
        [("--overlap 0.5", {"overlap": 0.5})],
    ),
    ids=str,
)
@pytest.mark.parametrize("trained_as", ["float32", "float64", None])
def test_what_predicts_follows_from_each_pair_of_options(
    line: Line, shape: tuple[int, ...], axis: str, trained_as: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    of = TrainedNetwork(
        Path("run"), "mesh", {} if trained_as is None else {"dtype": trained_as}, {"ignore": 7}, "digest"
    )
    found: dict[str, Any] = {"scores": None}
    inputs = SimpleNamespace(shape=shape, close=lambda: None)

    def note(**values: Any) -> Any:
        found.update(values)
        return next(iter(values.values()))

    class Predicted:
        def __init__(self, options: Any, *given: Any) -> None:
            found.update(batch=options.batch, overlap=options.overlap)
            assert given == (of, inputs, "field", found["placed"], "placed network")

        def write(self) -> Path:
            return Path("prediction.zarr")

    class Communicators:
        COMM_WORLD = SimpleNamespace(size=6, rank=0)

    class Grid(SimpleNamespace):
        def describe(self) -> str:
            return "grid"

    def grid(comm: Any, **extents: int) -> Grid:
        found.update(grid=extents, placed=Grid(**extents))
        return found["placed"]

    def distribute_network(of: Any, network: str, grid: Any, device: Any, dtype: Any) -> str:
        assert (network, grid, dtype) == ("network", found["placed"], found["dtype"])
        found["device"] = device
        return "placed network"

    monkeypatch.setattr(predict, "MPI", Communicators)
    monkeypatch.setattr(predict, "select_device", lambda name, comm: name)
    monkeypatch.setattr(predict, "find_network", lambda path, comm: of)
    monkeypatch.setattr(predict.labelled, "is_labelled", lambda of, data: False)
    monkeypatch.setattr(predict, "open_inputs", lambda *_: inputs)
    monkeypatch.setattr(predict, "loader_field", lambda options, of, inputs, dtype: note(dtype=dtype) and "field")
    monkeypatch.setattr(predict, "ProcessGrid", grid)
    monkeypatch.setattr(
        predict, "build_network", lambda of, comm, channels, options: note(channels=channels) and "network"
    )
    monkeypatch.setattr(predict, "distribute_network", distribute_network)
    monkeypatch.setattr(predict, "PredictionRun", Predicted)
    monkeypatch.setattr(
        predict, "score", lambda path, inputs, grid, ignore: note(scores=SimpleNamespace(results=ignore))
    )
    monkeypatch.setattr(predict, "try_on_all_ranks", lambda comm, action, error: "picture: x")
    monkeypatch.setattr(predict, "_write_summary", lambda options, of, comm, results, lines: found.update(lines=lines))
    options = parsed("predict", "run", "--data", "x.h5", "--out", str(tmp_path), *line.words)
    assert predict.run(options) == 0
    expected = {"grid": {axis: 6}, "dtype": getattr(torch, trained_as or "float32"), "device": None}
    expected |= {"batch": 1, "overlap": 0.25, "channels": 2} | dict(line.expected)
    assert (found["scores"] is None) == ("scores" in expected)
    expected.pop("scores", None)
    assert {name: found[name] for name in expected} == expected
    scored = "no scores: there are no labels" if found["scores"] is None else "namespace(results=7)"
    assert found["lines"] == [scored, "picture: x", "predictions: prediction.zarr"]


@pytest.mark.parametrize(
    "words", ["--window h=4", "--overlap 0.5", "--raw", "--normalise-as other.h5", "--model net:small"]
)
def test_an_output_is_not_gone_on_with_by_other_options(words: str) -> None:
    def note(*more: str) -> Any:
        options = parsed("predict", "run", "--data", "x.h5", "--out", "out", *more)
        of: Any = SimpleNamespace(digest="digest")
        inputs: Any = SimpleNamespace(shape=(2, 1, 9, 8), name="image")
        return PredictionRun(options, of, inputs, *[None] * 3)._note  # type: ignore[arg-type]

    assert note() == note("--batch", "3") and note(*words.split()) != note()


def test_a_grid_has_no_axis_that_the_samples_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "ProcessGrid", lambda comm, **extents: extents)
    for dimensions, lacking in ((3, "dh"), (4, "d"), (5, "")):
        for axis in "ndhw":
            options: Any = SimpleNamespace(grid={"d": 1, axis: 2})
            if axis in lacking:
                with pytest.raises(GridError, match=f"^--grid: the samples have no axis {axis}. Use axes of"):
                    predict._grid(options, MPI.COMM_SELF, dimensions)
            else:
                assert predict._grid(options, MPI.COMM_SELF, dimensions) == options.grid


def test_labelled_samples_are_predicted_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Outcome(SimpleNamespace):
        def __str__(self) -> str:
            return "75.00 %"

    trained = TrainedNetwork(Path("run"), "classify", {}, {}, "digest")
    outcome = Outcome(accuracy=0.75, loss=0.5)
    monkeypatch.setattr(predict, "find_network", lambda path, comm: trained)
    monkeypatch.setattr(predict.labelled, "is_labelled", lambda of, data: (of, data) == (trained, Path("x.h5")))
    monkeypatch.setattr(predict.labelled, "predict", lambda *given: (Path("p.zarr"), "test", outcome))
    monkeypatch.setattr(predict, "peak_memory_bytes", lambda: 9)
    assert predict.run(parsed("predict", "run", "--data", "x.h5", "--out", str(tmp_path))) == 0
    assert capsys.readouterr().out == "test accuracy: 75.00 %\npredictions: p.zarr\n"
    text = (tmp_path / "summary.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    assert json.loads(text) == {
        **{"weights": "run", "task": "classify", "data": "x.h5", "group": "test", "accuracy": 0.75, "loss": 0.5},
        **{"ranks": 1, "peak_memory_bytes": [9]},
    }

"""TensorBoard's scalars are those of metrics.jsonl, none twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from distconv.jobs.configuration.tracking import TensorBoard

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_run_that_goes_on_has_each_scalar_once(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 0.5**step, "optimizer": "sgd", "done": True} for step in range(1, 5)]
    first = TensorBoard(tmp_path, [])
    for line in lines:
        first.write(line)
    first.close()
    (tmp_path / "tensorboard" / "notes.txt").write_text("of a user")
    second = TensorBoard(tmp_path, lines[:2])  # killed, and resumed from step 2
    for line in (*lines[2:], {"step": 4, "evaluation": "test", "accuracy": 1}):
        second.write(line)
    second.close()
    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "of a user"
    assert scalars(tmp_path) == {
        "loss": [(line["step"], line["loss"]) for line in lines],
        "test/accuracy": [(4, 1.0)],
    }

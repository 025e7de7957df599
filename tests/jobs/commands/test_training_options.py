"""Options of each training command that the others do not have: how its samples are opened, and its own settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.jobs.approved import assert_approved
from tests.jobs.command_lines import Line, pairs
from tests.jobs.training.observed_training import observed

Options = Sequence[Sequence[tuple[str, Mapping[str, Any]]]]

READERS = [("--readers 3", {"samples.readers": 3})]
TEST_DATA = [("--test-data y.h5", {"samples.test_path": "y.h5"})]
NAMES = (
    [("--image-name a/b", {"image": "a/b"})],
    [("--label-name c", {"label": "c"})],
)
EVERY = [("--evaluate-every 2", {"evaluated": [2, 4, 6]}), ("--evaluate-every 4", {"evaluated": [4]})]

TASKS: dict[str, Options] = {
    "classify": (
        READERS,
        TEST_DATA,
        *NAMES,
        [("--classes 7", {"samples.classes": 7})],
        [("--max-train-samples 50", {"samples.limit": 50})],
        [("--model alexnet", {"model": "alexnet"})],
        [("--augment", {"augment": "crop,flip"}), ("--augment flip", {"augment": "flip"})],
        EVERY,
    ),
    "mesh": (
        READERS,
        [("--baselines", {"samples.extrapolated": True})],
        [("--no-augment", {"augment": False})],
        [("--model mesh1k", {"model": "mesh1k"})],
        [("--lr 0.5", {"lr": 0.5})],
    ),
    "segmentation": (
        READERS,
        TEST_DATA,
        *NAMES,
        [("--classes 7", {"samples.classes": 7})],
        [("--ignore-label 255", {"samples.ignore": 255, "ignore_label": 255})],
        [("--model unet3d", {"model": "unet3d"})],
        [("--loss cross-entropy+dice", {"loss": "cross-entropy+dice"})],
        [
            ("--class-weights 1,2.5", {"class_weights": "1.0,2.5"}),
            ("--class-weights balanced", {"class_weights": "balanced"}),
        ],
        [("--crop w=8,h=6", {"crop": "w=8,h=6"})],
        [("--mirror wd", {"mirror": "dw"})],
        EVERY,
    ),
    "pointcloud": (
        [("--model vgg16_bn", {"model": "vgg16_bn"})],
        [("--width 4", {"width": 4})],
        [("--resolution 50", {"resolution": 50})],
        [("--points 300", {"points": 300})],
        [("--keep 0.5", {"keep": 0.5})],
        [("--varied", {"varied": True})],
        [("--batch 6", {"batch": 6, "part": 6})],
    ),
    "sequence": (
        [("--model rnn", {"model": "rnn"})],
        [("--method blelloch", {"method": "blelloch"})],
        [("--length 99", {"length": 99, "samples.length": 99})],
        [("--coefficients 5", {"coefficients": 5, "samples.coefficients": 5})],
        [("--window-ms 30", {"window_ms": 30.0, "samples.window_ms": 30.0})],
        [("--hop-ms 7", {"hop_ms": 7.0, "samples.hop_ms": 7.0})],
        [("--stereo", {"stereo": True, "samples.stereo": True})],
    ),
}


def values_of(found: dict[str, Any]) -> dict[str, Any]:
    """All that was handed on, without the names of what holds it; ``capture`` follows from the model."""
    settings, more = found.pop("settings"), found.pop("more")
    values = {**found, **settings, **more, "capture": None}
    if "samples.names" in values:
        values["image"], values["label"] = values.pop("samples.names")
    return {name: str(value) if name == "samples.test_path" else value for name, value in values.items()}


@pytest.mark.parametrize(
    ("task", "line"), [(task, line) for task, options in TASKS.items() for line in pairs(*options)], ids=str
)
def test_samples_and_settings_follow_from_each_pair_of_options(
    task: str, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option changes what is expected of it, and nothing else."""
    without, found = (
        values_of(observed(monkeypatch, task, ["--data", "x.h5", *words], ranks=2)) for words in ((), line.words)
    )
    assert found == without | dict(line.expected)


@pytest.mark.parametrize("task", TASKS)
def test_values_without_options_are_as_approved(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(observed(monkeypatch, task, ["--data", "x.h5"], ranks=2))
    assert_approved(f"training/{task}", "\n".join(f"{name} = {value!r}" for name, value in sorted(values.items())))

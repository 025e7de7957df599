"""Where a model is cut: stages of about equal time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from distconv.jobs.training.pipelines.stages import balanced_cuts, choose_split_points
from distconv.layers.models import MODELS
from distconv.perfmodel import Layer, Machine, Profile, trace
from distconv.perfmodel.profiles.predicted_profile import predicted_profile
from distconv.pipeline import SplitError


@pytest.mark.parametrize("replicas", [[1, 1], [1, 1, 1], [3, 1]])
def test_balanced_cuts_leave_no_stage_more_than_a_layer_above_the_mean(replicas: list[int]) -> None:
    model, shape = MODELS["resnet20"].factory(), (8, 3, 32, 32)
    layers = predicted_profile(trace(model, shape), Machine.load("localhost")).layers
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)]
    cuts = balanced_cuts(model, shape, replicas)
    starts = [0, *(next(i for i, layer in enumerate(layers) if layer.name == cut) for cut in cuts), len(layers)]
    times = [sum(layer.time_s for layer in layers[a:b]) for a, b in pairwise(starts)]
    ends = [next(i for i, layer in enumerate(layers) if layer.name == name) for name in names]
    largest = max(sum(layer.time_s for layer in layers[a:b]) for a, b in pairwise(ends))
    mean = sum(times) / sum(replicas)
    assert max(time / count for time, count in zip(times, replicas, strict=True)) <= mean + largest


def test_what_comes_before_the_first_layer_is_in_its_part() -> None:
    """Most of the time goes to the normalisation before it, where nothing is cut."""
    norms = [torch.nn.BatchNorm2d(3) for _ in range(6)]
    model = torch.nn.Sequential(*norms, torch.nn.Conv2d(3, 2, 1), torch.nn.Conv2d(2, 1, 1), torch.nn.Conv2d(1, 1, 1))
    assert balanced_cuts(model, (4, 3, 32, 32), [1, 1]) == ["7"]
    assert balanced_cuts(model, (4, 3, 32, 32), [1]) == []


def test_blocks_between_starts_are_divided_by_time_and_replicas() -> None:
    """Blocks of 3, 3, 2, 4 and 6 seconds; the transfer of a few bytes takes no time."""
    times = {"a": 1, "b": 2, "c": 3, "d": 1, "e": 1, "f": 4, "g": 6}
    profile = Profile([Layer(name, time / 4, 3 * time / 4, 8, 4) for name, time in times.items()])
    starts = ["b", "c", "d", "f", "g"]
    cuts = {count: choose_split_points(profile, starts, replicas, "Net") for count, replicas in CHOICES.items()}
    assert cuts == {"two": ["f"], "three": ["d", "g"], "more first": ["g"], "more last": ["d"]}
    with pytest.raises(SplitError, match="Net: has 2 layers to split at, too few for 3 parts"):
        choose_split_points(profile, starts[:2], [1, 1, 1], "Net")


CHOICES = {"two": [1, 1], "three": [1, 1, 1], "more first": [2, 1], "more last": [1, 2]}

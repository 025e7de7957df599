"""The references: a majority vote, and a perceptron that learns what single points tell and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distconv.errors import DataError
from distconv.jobs.pointcloud.baselines import PointPerceptron, perceptron
from distconv.jobs.pointcloud.clouds import Cloud


class Sticks:
    """Points about one of the three axes: what single points tell."""

    class_names, part_names, points = ("x", "y", "z"), (), 30

    def __init__(self, count: int, seed: int) -> None:
        self.labels, self._seed = np.arange(count) % 3, seed

    def __getitem__(self, index: int) -> Cloud:
        points = np.random.default_rng((self._seed, index)).normal(scale=0.1, size=(30, 3)).astype(np.float32)
        points[:, self.labels[index]] *= 10
        return Cloud(points, int(self.labels[index]))


def test_the_order_of_the_points_does_not_matter_to_the_perceptron() -> None:
    torch.manual_seed(0)
    model = PointPerceptron(4, width=8).double().eval()
    points = torch.rand(3, 50, 3, dtype=torch.float64)
    logits = model(points)
    assert logits.shape == (3, 4)
    assert torch.allclose(model(points[:, torch.randperm(50)]), logits, rtol=0, atol=1e-12)
    # Nor how often a point is there, which a mean would tell.
    assert torch.allclose(model(torch.cat([points, points[:, :7]], 1)), logits, rtol=0, atol=1e-12)


@pytest.mark.long
def test_the_perceptron_learns_what_single_points_tell_and_leaves_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    first = perceptron(Sticks(60, 0), Sticks(30, 1), epochs=4, batch=6, seed=2)
    assert first > 0.9
    assert first == perceptron(Sticks(60, 0), Sticks(30, 1), epochs=4, batch=6, seed=2)
    assert torch.equal(state, torch.random.get_rng_state())


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(DataError, match="0 training and 3 test clouds: at least one of each is required"):
        perceptron(Sticks(0, 0), Sticks(3, 0))

"""The references: a majority vote, and a perceptron that learns what single points tell and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from distconv.errors import DataError
from distconv.jobs.pointcloud import baselines
from distconv.jobs.pointcloud.baselines import PointPerceptron, perceptron
from distconv.jobs.pointcloud.clouds import Cloud
from distconv.jobs.pointcloud.sampling import draw_points
from distconv.jobs.pointcloud.voxels import unit_cube


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


def test_the_perceptron_has_the_layers_and_the_training_of_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []
    made: list[torch.optim.Optimizer] = []

    def draw(available: int, count: int, *, seed: int, epoch: int, sample: int) -> np.ndarray:
        assert (available, count) == (30, 512)
        drawn.append((seed, epoch, sample))
        return draw_points(available, count, seed=seed, epoch=epoch, sample=sample)

    class Adam(torch.optim.Adam):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr)
            made.append(self)

    monkeypatch.setattr(baselines, "draw_points", draw)
    monkeypatch.setattr(torch.optim, "Adam", Adam)
    perceptron(Sticks(7, 0), Sticks(4, 1), epochs=2, batch=3, seed=5)
    orders = [np.random.default_rng((5, epoch)).permutation(7).tolist() for epoch in (0, 1)]
    assert drawn == [(5, epoch, s) for epoch in (0, 1) for s in orders[epoch]] + [(5, 0, s) for s in range(4)]
    (optimizer,) = made
    (group,) = optimizer.param_groups
    assert group["lr"] == 1e-3 and {state["step"].item() for state in optimizer.state.values()} == {2 * 3}
    shapes = [(64, 3), (128, 64), (256, 128), *[(width,) for width in (64, 128, 256) for _ in range(2)]]
    found = [tuple(parameter.shape) for parameter in group["params"]]
    weights = [shape for shape in found if len(shape) == 2]
    assert weights == [*shapes[:3], (128, 256), (3, 128)] and found[6:12] == shapes[3:]
    defaults = inspect.signature(perceptron).parameters
    assert [defaults[name].default for name in ("epochs", "batch", "seed")] == [10, 32, 0]
    points, labels = baselines._stacked(Sticks(3, 0), np.array([2, 0]), 1, 4)
    cloud = Sticks(3, 0)[2].points
    taken = torch.from_numpy(cloud[draw_points(30, 512, seed=1, epoch=4, sample=2)])
    assert torch.equal(points[0], unit_cube(taken) - 0.5) and labels.tolist() == [2, 0]


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

"""Versions of a stage's weights: which one a pass finds, and which one its backward pass reads."""

from __future__ import annotations

import pytest
import torch

from distconv.pipeline import ScheduleError
from distconv.pipeline.stage.weight_versions import WeightVersions


def weight(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def update(versions, change, predicts=False):
    versions.prepare_update(predicts)
    with torch.no_grad():
        for tensor in versions.parameters:
            tensor += change


def test_a_stashed_version_is_bound_until_it_is_released():
    w = weight(1.0, 2.0)
    versions = WeightVersions([w])
    versions.stash(0, microbatch=3)
    update(versions, 10.0)
    with versions.bind(0):
        assert w.tolist() == [1.0, 2.0]
    with versions.bind(1):
        assert w.tolist() == [11.0, 12.0]
    assert w.tolist() == [11.0, 12.0]
    versions.release(microbatch=4)
    with versions.bind(0):
        assert w.tolist() == [1.0, 2.0]
    versions.release(microbatch=3)
    with pytest.raises(KeyError), versions.bind(0):
        pass


def test_a_prediction_goes_on_as_the_last_update_did_and_is_of_one_pass():
    w = weight(1.0)
    versions = WeightVersions([w])
    update(versions, 0.5, predicts=True)
    versions.predict(4)  # three updates ahead of version 1
    with versions.bind(4):
        assert w.item() == 1.5 + 3 * 0.5
    with versions.bind(None):
        assert w.item() == 1.5


@pytest.mark.parametrize("version", [0, 1])
def test_a_backward_pass_reads_the_weights_that_are_bound_then(version):
    """y = (w x) w has dy/dx = w w: of the weights of the backward pass, whatever the forward pass had."""
    w, x = weight(3.0), torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    versions = WeightVersions([w])
    with versions.save_notes():
        y = (w * x) * w
    assert y.item() == 18.0
    versions.stash(0, None)
    update(versions, 2.0)
    with versions.bind(version):
        y.sum().backward()
    assert x.grad.item() == {0: 9.0, 1: 25.0}[version]


def test_views_of_a_weight_are_read_anew_too():
    w, x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_(), torch.ones(1, 3, dtype=torch.float64)
    x.requires_grad_()
    versions = WeightVersions([w])
    with versions.save_notes():
        y = x @ w.T
    update(versions, 1.0)
    with versions.bind(1):
        y.sum().backward()
    assert x.grad.tolist() == [[5.0, 7.0, 9.0]]  # columns of 1..6 summed up


def test_an_activation_that_changed_meanwhile_is_refused():
    w, versions = weight(1.0), None
    versions = WeightVersions([w])
    with versions.save_notes():
        hidden = torch.tanh(w)
        y = hidden * 2
    hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"an activation of shape \(1,\) .* was modified in place"):
        y.sum().backward()


def test_weights_that_share_memory_are_refused():
    w = torch.zeros(4)
    WeightVersions([w, torch.zeros(4), torch.zeros(0), torch.zeros(0)]).check_separate()
    with pytest.raises(ScheduleError, match="weights that share memory"):
        WeightVersions([w, w[2:]]).check_separate()

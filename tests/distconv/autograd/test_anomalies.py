"""``torch.autograd.detect_anomaly``: all ranks raise for a NaN that a step gives on any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere

PLAIN = normal(5, 3, 7, 9).abs() + 1


def _loss(grid: dc.ProcessGrid, whole: bool, *, anomalous: bool) -> tuple[nn.Module, torch.Tensor]:
    """The loss of a layer; ``anomalous``: 0 / 0 behind the root of the last element, and nowhere else."""
    torch.manual_seed(0)
    conv = dc.parallelize(nn.Conv2d(3, 4, 3, padding=1).double(), grid)
    values = PLAIN.clone()
    values[-1, -1, -1, -1] = 0.0 if anomalous else 1.0
    x = dc.scatter(values, grid).requires_grad_()
    root = torch.sqrt(x) * (x > 0)
    y = conv(root + x)
    return conv, (dc.gather(y) if whole else y).square().sum()


@pytest.mark.long
@pytest.mark.fault(93)
@pytest.mark.filterwarnings("ignore:Error detected", "ignore:Anomaly Detection")
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("whole", [False, True])
def test_a_nan_on_one_rank_is_an_error_on_all(comm: Any, whole: bool) -> None:
    for axis in "nhc":
        grid = grid_over(comm, **{axis: comm.size})
        with torch.autograd.detect_anomaly():
            _, loss = _loss(grid, whole, anomalous=True)
            raises_everywhere(comm, dc.NumericalError, r"SqrtBackward0' returned nan values.*on rank", loss.backward)
            conv, loss = _loss(grid, whole, anomalous=False)
            loss.backward()
        expected, loss = _loss(grid, whole, anomalous=False)
        loss.backward()
        assert torch.equal(dc.gather(conv.weight.grad) if axis == "c" else conv.weight.grad, expected.weight.grad)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.ranks(2)
def test_where_the_anomaly_was_made_is_said(comm: Any) -> None:
    with torch.autograd.detect_anomaly():
        _, loss = _loss(grid_over(comm, h=2), False, anomalous=True)
        with (
            pytest.warns(UserWarning, match=r"detected on rank 1(.|\n)*test_anomalies(.|\n)*torch\.sqrt"),
            pytest.raises(dc.NumericalError),
        ):
            loss.backward()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.ranks(2, 3)
def test_of_several_anomalies_the_first_step_counts_not_the_first_rank(comm: Any) -> None:
    grid = grid_over(comm, n=comm.size)
    # 0 / 0 behind the first root on rank 0, and before that, on the way back, behind the second on the last rank.
    values = torch.tensor([0.0, *[4.0] * (comm.size - 1)], dtype=torch.float64)
    less = torch.tensor([*[-1.0] * (comm.size - 1), 2.0], dtype=torch.float64)
    with torch.autograd.detect_anomaly():
        x = dc.scatter(values, grid).requires_grad_()
        first = torch.sqrt(x)
        second = torch.sqrt(first + 1 - (dc.scatter(less, grid) + 1))
        with (
            pytest.warns(UserWarning, match=f"detected on rank {comm.size - 1}"),
            pytest.raises(dc.NumericalError, match=rf"SqrtBackward0' returned nan.*\(on rank {comm.size - 1}\)"),
        ):
            (second * 0).sum().backward()


def test_plain_tensors_get_torchs_own_check() -> None:
    x = torch.zeros(1, requires_grad=True)
    with (
        pytest.warns(UserWarning),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"),
    ):
        (torch.sqrt(x) * x.detach()).sum().backward()

"""``check_rule``: valid operators pass, and every kind of error is found, in a single process, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from distconv.errors import MismatchError

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

P, THREE = dc.Window(), dc.Window(3, padding=1)
X = torch.randn(2, 2, 7, 8, generator=torch.Generator().manual_seed(0))

WEIGHT = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))


def smooth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight.expand(2, 1, 3, 3), groups=2).tanh()


def mean_free(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(2, keepdim=True)


def beyond_window(x: torch.Tensor) -> torch.Tensor:
    return F.pad(F.avg_pool2d(x, (5, 1), stride=1), (0, 0, 1, 1))


def offset(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[2]).view(-1, 1)


class HalvedGradient(torch.autograd.Function):
    """Half the gradient where a block begins: what is wrong backwards alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[:, :, 0] /= 2
        return grad


def wrong_backwards(x: torch.Tensor) -> torch.Tensor:
    return HalvedGradient.apply(x)


def test_a_right_operator_passes_on_all_grids(comm: Any) -> None:
    rule = dc.rule(x={0: P, 2: THREE, 3: THREE}, fill=0.25)(smooth)
    tried = dc.check_rule(rule, (X, WEIGHT), comm)
    in_blocks = [what for what in tried if "blocks of dimension" in what]
    assert {what.split()[3] for what in in_blocks} == {"0", "2", "3"}
    # Of four axes: one grid of one rank, four of two or three, ten of four; each in blocks of three kinds.
    assert len(tried) - len(in_blocks) == {1: 1, 2: 12, 3: 12, 4: 30}[comm.size]


def test_channels_with_replicated_weights_are_no_window(comm: Any) -> None:
    rule = dc.rule(x={0: P, 1: P, 2: THREE, 3: THREE})(smooth)
    with pytest.raises(
        MismatchError, match="smooth, blocks of dimension 1 that end at 1, 2: the operator failed: RuntimeError"
    ):
        dc.check_rule(rule, (X, WEIGHT), comm)


@pytest.mark.long
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("operator", "windows", "reason"),
    [
        (mean_free, {0: P, 1: P, 2: P, 3: P}, "output 0 differs by"),
        (beyond_window, {0: P, 1: P, 2: THREE, 3: P}, "the operator failed: RuntimeError"),
        (offset, {0: P, 1: P, 2: P, 3: P}, "output 0 differs by"),
        (wrong_backwards, {0: P, 1: P, 2: P, 3: P}, "gradient of 'x' differs by"),
    ],
)
def test_what_is_wrong_is_found(comm: Any, operator: Any, windows: Any, reason: str) -> None:
    with pytest.raises(MismatchError, match=reason) as caught:
        dc.check_rule(dc.rule(x=windows)(operator), (X,), comm)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert dc.check_rule(dc.rule(x={0: P, 1: P, 3: P})(operator), (X,), comm)


def test_a_function_without_a_rule_raises(comm: Any) -> None:
    with pytest.raises(TypeError, match=r"smooth has no rule. Decorate it with distconv.rule"):
        dc.check_rule(smooth, (X, X), comm)


def test_an_operator_with_more_results_on_small_blocks_is_found() -> None:
    rule = dc.rule(x={0: P, 1: P, 2: P, 3: P})(lambda x: (x, x + 1) if x.shape[2] < X.shape[2] else x)
    with pytest.raises(MismatchError, match=r"results output 0, output 1, .*, but output 0, .* in a single process"):
        dc.check_rule(rule, (X,))

"""Memory that pipelining with stale weights adds, against the figures that the paper prints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distconv.layers.models import lenet5, resnet20, vgg16
from distconv.perfmodel.stages.devices import PartitionError
from distconv.perfmodel.stages.stale_memory import Footprint, footprint
from distconv.pipeline import schedule
from distconv.pipeline.schedules.memory import peak_memory

CIFAR, MINIBATCH = (3, 32, 32), 128


def percent(found: Footprint, stash: bool = False) -> int:
    return round(100 * found.increase(stash=stash))


def test_every_module_call_counts_but_containers_and_the_model_itself_do_not():
    """17, 16 and 16 outputs of 16x32x32, of half and of a quarter of that; torchsummary 1.5.1 says 3.53 and 1.03."""
    found = footprint(resnet20(), CIFAR, 1)
    assert found.activations == (4 * (16384 * (2 + 15 + 15 / 2 + 15 / 4) + 10),)
    assert found.weights == 4 * 269722


def test_registers_divide_the_outputs_and_lose_none():
    whole = footprint(vgg16(), CIFAR, 2)
    parts = footprint(vgg16(), CIFAR, 2, (2, 4, 7))
    assert sum(parts.activations) == whole.activations[0] and parts.total == whole.total
    assert parts.activations[0] == 2 * 4 * (4 * 65536 + 16384)  # two convolutions, two ReLUs and the pool


def test_a_module_called_twice_counts_twice_and_outputs_in_a_tuple_all_count():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.split = nn.Linear(4, 4), Halves()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.split(self.linear(self.linear(x)))
            return first + second

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.chunk(2, 1)

    assert footprint(Twice(), (4,), 3, (1,)).activations == (48, 96)


def test_resnet_20_is_as_printed_in_table_9():
    found = footprint(resnet20(), CIFAR, MINIBATCH, (7,))
    assert (percent(found, stash=True), percent(found)) == (61, 60)


def test_the_model_is_not_touched():
    model = lenet5()
    footprint(model, (1, 28, 28), 4, (1, 2))
    assert all(not p.is_meta for p in model.parameters()) and not model.c1._forward_hooks


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_copies_kept_are_those_in_flight_in_the_schedule_but_for_the_one_in_use(stages):
    in_flight = [memory.in_flight for memory in peak_memory(schedule("stale", stages, 4 * stages))]
    for stage, count in enumerate(in_flight):
        alone = tuple(1.0 if other == stage else 0.0 for other in range(stages))
        assert Footprint(0.0, alone).kept == count - 1


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((0,), "counted from 1 and must rise"),
        ((2, 2), r"placement \(2, 2\)"),
        ((5,), "after layer 5 of 5 leave the last stage without a layer; use at most 4"),
    ],
)
def test_bad_placements_are_refused(placement, message):
    with pytest.raises(PartitionError, match=message):
        footprint(lenet5(), (1, 28, 28), 1, placement)

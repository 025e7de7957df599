"""Memory and bytes of a step, as the page of networks counts them."""

from __future__ import annotations

import torch
from torch import nn

from distconv.communication.transport import Traffic
from tests.layers.models.step_costs import activation_bytes, peak_bytes, sent_bytes

KIB = 1 << 10


def test_the_peak_has_temporary_tensors_and_not_what_was_there_before() -> None:
    kept = torch.zeros(KIB, dtype=torch.uint8)

    def function() -> None:
        for _ in range(3):
            a = torch.zeros(4 * KIB, dtype=torch.uint8)
            del a
        torch.cat([kept, torch.zeros(KIB, dtype=torch.uint8)])

    assert peak_bytes(function) == 4 * KIB


def test_activations_are_what_autograd_keeps_and_no_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh())
    x = torch.zeros(8, 64, requires_grad=True)
    assert activation_bytes(model, [x]) == 2 * x.nbytes


def test_all_reduces_count_as_a_ring_and_gradients_of_weights_not() -> None:
    traffic = Traffic()
    traffic.sent["halo exchange"] += 100
    traffic.reduced["sum over h", 4] += 40
    traffic.reduced["gradient sum of 3 parameters", 4] += 1000
    assert sent_bytes(traffic) == 160

"""The packages of a user's own model, weighed."""

from __future__ import annotations

import torch

from distconv.jobs.planning.package_memory import build_and_measure, packages_bytes

KEPT: list[bytearray] = []
MIB = 1 << 20


def heavy() -> torch.nn.Module:
    """A model of 32 MiB whose import keeps 64 MiB."""
    KEPT.append(bytearray(b"x") * (64 * MIB))
    return torch.nn.Linear(4096, 2048, bias=False)


def test_what_stays_beside_the_weights_is_that_of_the_packages_once_and_only_of_ones_own_models() -> None:
    for _ in range(2):
        assert isinstance(build_and_measure("of.ones:own", heavy), torch.nn.Linear)
        assert abs(packages_bytes("of.ones:own") - 64 * MIB) < 8 * MIB
    build_and_measure("lenet5", heavy)
    assert packages_bytes("lenet5") == packages_bytes("never.seen:before") == 0

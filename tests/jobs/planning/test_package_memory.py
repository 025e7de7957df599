"""The packages of a user's own model, weighed."""

from __future__ import annotations

import pytest
import torch

from distconv.jobs.planning import package_memory
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


def test_what_training_imports_anyway_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    resident = iter((1000, 1000 + 24 + 500, 2000, 1990))
    monkeypatch.setattr(package_memory, "_package_bytes", {})
    monkeypatch.setattr(package_memory.importlib, "import_module", steps.append)
    monkeypatch.setattr(package_memory, "_resident_bytes", lambda: steps.append("read") or next(resident))
    for name in ("a:b", "c:d"):
        build_and_measure(name, lambda: steps.append("build") or torch.nn.Linear(2, 2))
    assert steps == ["torch._dynamo", "read", "build", "read"] * 2
    assert (packages_bytes("a:b"), packages_bytes("c:d")) == (500, 0)

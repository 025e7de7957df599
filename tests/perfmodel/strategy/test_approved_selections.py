"""Plans chosen for networks of all kinds, as approved: layers, time, memory, bound and uniform plans."""

from __future__ import annotations

import pytest

from distconv.errors import DistconvError
from distconv.perfmodel.cost.evaluation import Prediction
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import select
from tests.jobs.approved import assert_approved
from tests.perfmodel.mixed_networks import NETWORKS, digits, uneven_machine
from tests.perfmodel.networks import RandomNetwork


def described(uniform: Prediction | None) -> str:
    return "none" if uniform is None else f"{digits(uniform.time)} s, {digits(uniform.memory)} B"


@pytest.mark.parametrize("method", ["exact", "longest-path"])
def test_selections(method: str) -> None:
    cases = {name: (network(), shape) for name, (network, shape) in NETWORKS.items()}
    for seed in range(4):
        network = RandomNetwork(seed, 4)
        cases[f"random {seed}"] = (network, (4, network.channels, 17, 24))
    lines = []
    for name, (network, shape) in cases.items():
        graph = trace(network, shape)
        for ranks, fraction in ((2, None), (4, None), (4, 0.8), (8, 0.01)):
            limit = None
            if fraction is not None:
                limit = fraction * select(graph, uneven_machine(), ranks, method="longest-path").memory
            title = f"{name}, {ranks} ranks, {'no limit' if limit is None else digits(limit)}"
            try:
                found = select(graph, uneven_machine(), ranks, memory=limit, method=method, seconds=60.0)
            except DistconvError as error:
                lines.append(f"{title}: {type(error).__name__}: {error}")
                continue
            lines.append(
                f"{title}: {digits(found.time)} s, {digits(found.memory)} B, at least {digits(found.bound)} s, "
                f"gap {found.gap:.3f}, {found.optimal} {found.method} {found.estimated}"
            )
            lines.append(f"    {found.plan.layers} {found.impossible}")
            lines += [f"    {kind}: {described(uniform)}" for kind, uniform in found.uniform.items()]
    assert_approved(f"perfmodel/selections/{method}", "\n".join(lines))

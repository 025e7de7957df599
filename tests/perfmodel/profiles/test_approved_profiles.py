"""Profiles predicted from networks with all kinds of operations, as approved, and their layers joined and scaled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

import pytest

from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.profiles.joined_layers import join_layers
from distconv.perfmodel.profiles.layer_profile import Profile
from distconv.perfmodel.profiles.predicted_profile import predicted_profile, scale_profile
from tests.jobs.approved import assert_approved
from tests.perfmodel.mixed_networks import GRIDS, NETWORKS, digits, uneven_machine


def described(profile: Profile) -> Iterator[str]:
    for layer in profile.layers:
        name, *numbers = astuple(layer)
        yield f"    {name}: {' '.join(digits(number) for number in numbers if isinstance(number, (int, float)))}"
    yield f"    {profile.edges}"


@pytest.mark.parametrize("name", NETWORKS)
def test_profiles(name: str) -> None:
    network, shape = NETWORKS[name]
    graph, machine = trace(network(), shape), uneven_machine()
    whole = predicted_profile(graph, machine)
    names = [layer.name for layer in whole.layers]
    profiles = {"one rank": whole, "a third": scale_profile(whole, 1 / 3), "joined": join_layers(whole, names[2::4])}
    profiles |= {str(grid): predicted_profile(graph, machine, {"*": grid}, 4) for grid in GRIDS[name]}
    lines = [line for title, profile in profiles.items() for line in (title, *described(profile))]
    assert_approved(f"perfmodel/profiles/{name}", "\n".join(lines))

"""Measured links: who talks to whom, the fit, and one measurement under MPI."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from distconv.perfmodel.machine import measure_links
from distconv.perfmodel.machine.measure_links import (
    SIZES,
    far_partners,
    fit_link,
    near_partners,
    node_indices,
    profile_network,
)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24))
def test_partners_are_mutual_and_on_the_right_nodes(nodes):
    for partners, far in ((near_partners(nodes), False), (far_partners(nodes), True)):
        assert all(partners[partners[rank]] == rank != partners[rank] for rank in partners)
        assert all((nodes[rank] != nodes[partner]) == far for rank, partner in partners.items())


def test_as_many_ranks_as_possible_have_a_partner():
    assert len(near_partners([0] * 7)) == 6
    assert len(far_partners([0] * 4 + [4] * 4 + [8] * 4)) == 8
    assert far_partners([0, 0, 0]) == near_partners([0, 1, 2]) == {}


@given(st.floats(1e-7, 1e-3), st.floats(1e7, 1e12))
def test_a_fit_finds_the_link_that_made_the_times(latency, bandwidth):
    found = fit_link(SIZES, [latency + n / bandwidth for n in SIZES])
    assert found.send(8) == pytest.approx(latency + 8 / bandwidth, rel=1e-2)
    assert found.send(8 << 20) == pytest.approx(latency + (8 << 20) / bandwidth, rel=1e-2)


@given(st.lists(st.floats(1e-9, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_a_fit_of_any_times_is_positive_and_finite(seconds):
    found = fit_link(SIZES, seconds)
    assert 0 < found.latency_s < math.inf and 0 < found.bandwidth_bytes_per_s < math.inf


@pytest.mark.ranks(2, 3)
def test_ranks_of_one_host_share_a_node(comm):
    assert node_indices(comm) == [0] * comm.size


@pytest.mark.ranks(2)
def test_a_measurement_is_the_same_on_all_ranks_and_of_sane_order(comm):
    found = profile_network(comm)
    assert found.network is None and found.node is not None
    assert len(set(comm.allgather(found))) == 1
    for link in (found.node.exchange, found.node.allreduce):
        assert 1e-7 < link.latency_s < 1e-1
        assert 1e6 < link.bandwidth_bytes_per_s < 1e13


@pytest.mark.ranks(3, 4)
def test_ranks_on_several_nodes_measure_the_network_too(comm, monkeypatch):
    """Also where nodes have different numbers of ranks, so that some have nobody to exchange with."""
    monkeypatch.setattr(measure_links, "node_indices", lambda comm: [0, 0, 2, 2][: comm.size])
    monkeypatch.setattr(measure_links, "SIZES", (8, 1024, 65536))
    found = profile_network(comm)
    assert found.node is not None and found.network is not None
    assert len(set(comm.allgather(found))) == 1
    for link in (found.network.exchange, found.network.allreduce):
        assert 0 < link.latency_s < math.inf and 0 < link.bandwidth_bytes_per_s < math.inf


def test_one_rank_has_nobody_to_measure_with():
    found = profile_network(MPI.COMM_SELF)
    assert found.node is None and found.network is None

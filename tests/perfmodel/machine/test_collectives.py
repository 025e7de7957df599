"""Collectives: the formulas against sums done by hand, and what holds for every size and number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distconv.errors import MachineError
from distconv.perfmodel.machine import collectives
from distconv.perfmodel.machine.collectives import LinkLevel
from distconv.perfmodel.machine.machine import Compute, Link, Machine, Overlap, RankGroup, Roofline

ALPHA, BETA, GAMMA = 10.0, 2.0, 0.5
COLLECTIVES = ["allreduce", "allgather"]


def level(ranks):
    return LinkLevel(ranks, Link(ALPHA, 1 / BETA), GAMMA)


def machine(ranks_per_node=4, node=(1e-6, 1e11), network=(1e-5, 1e10), memory=1e12):
    compute = (Compute(1, Roofline(1e13, memory, 1e-5)),)
    return Machine(
        name="test",
        ranks_per_node=ranks_per_node,
        memory_bytes=1e9,
        node=Link(*node),
        network=Link(*network),
        overlap=Overlap(True, True),
        compute=compute,
    )


# alpha is 10 per message, beta 2 per byte sent, gamma 1/2 per byte summed; n = 120 bytes.
BY_HAND = [
    ("allreduce_recursive_doubling", 8, 3 * 10 + 360 * 2 + 360 / 2),
    ("allreduce_recursive_doubling", 6, 2 * 10 + 240 * 2 + 240 / 2 + (2 * 10 + 240 * 2 + 120 / 2)),
    ("allreduce_rabenseifner", 8, 6 * 10 + 210 * 2 + 105 / 2),
    ("allreduce_rabenseifner", 6, 4 * 10 + 180 * 2 + 90 / 2 + (2 * 10 + 240 * 2 + 120 / 2)),
    ("allreduce_ring", 8, 14 * 10 + 210 * 2 + 105 / 2),
    ("allreduce_ring", 6, 10 * 10 + 200 * 2 + 100 / 2),
    ("allgather_doubling", 8, 3 * 10 + 105 * 2),
    ("allgather_doubling", 6, 3 * 10 + 100 * 2 + 120 / 2),
    ("allgather_ring", 8, 7 * 10 + 105 * 2),
    ("allgather_ring", 6, 5 * 10 + 100 * 2),
    ("reduce_scatter_halving", 8, 3 * 10 + 105 * 2 + 105 / 2),
    ("reduce_scatter_halving", 6, 4 * 10 + 240 * 2 + 220 / 2),
    ("reduce_scatter_pairwise", 8, 7 * 10 + 105 * 2 + 105 / 2),
    ("reduce_scatter_pairwise", 6, 5 * 10 + 100 * 2 + 100 / 2),
]


@pytest.mark.parametrize(("algorithm", "ranks", "expected"), BY_HAND)
def test_an_algorithm_costs_what_its_formula_gives_by_hand(algorithm, ranks, expected):
    assert getattr(collectives, algorithm)(level(ranks), 120) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_or_no_bytes_cost_nothing(name):
    time = getattr(machine(), name)
    assert time(RankGroup(1, 1), 1e6) == time(RankGroup(1, 4), 1e6) == 0.0
    assert time(RankGroup(16, 4), 0) == time(RankGroup(16, 1), 0) == 0.0


def test_two_levels_cost_the_sum_of_their_three_stages():
    """16 ranks, 4 per node: n = 4e6 bytes on the node twice, 1e6 between nodes; gamma is 3e-12."""
    node = 2 * 1e-6 + 3e6 * 1e-11 + 3e6 * 3e-12
    network = 4 * 1e-5 + 1.5e6 * 1e-10 + 0.75e6 * 3e-12
    back = 2 * 1e-6 + 3e6 * 1e-11
    assert machine().allreduce(RankGroup(16, 4), 4e6) == pytest.approx(node + network + back, rel=1e-12)


def test_ranks_that_do_not_divide_over_nodes_use_one_node_more():
    one = machine(network=(1.0, 1e30))
    assert one.levels(RankGroup(9, 4)).across.ranks == 3
    assert one.allreduce(RankGroup(9, 4), 8) == pytest.approx(3.0, abs=1e-4)  # to one that is left over, both, and back


def test_direct_messages_go_to_the_own_node_first():
    levels = machine(node=(1.0, 1e30), network=(100.0, 1e30)).levels(RankGroup(16, 4))
    assert [round(collectives.messages_time(levels, peers, 8)) for peers in (0, 1, 3, 4, 15)] == [0, 1, 3, 103, 1203]


def test_steps_of_a_collective_have_their_own_latency_where_the_link_says_so():
    """Recursive doubling over 16 nodes: four steps; a message between two ranks keeps its own."""
    here = replace(machine(), network=Link(1.0, 1e30, step_s=10.0))
    assert here.allreduce(RankGroup(16, 1), 8) == pytest.approx(40.0, rel=1e-6)
    assert here.send(8, across=True) == pytest.approx(1.0)
    levels = here.levels(RankGroup(16, 1))
    assert collectives.messages_time(levels, 3, 8) == pytest.approx(3.0)


@pytest.mark.parametrize(("ranks", "per_node"), [(0, 1), (1, 0), (-4, 2)])
def test_a_group_without_ranks_is_refused(ranks, per_node):
    with pytest.raises(MachineError, match="both must be at least 1"):
        RankGroup(ranks, per_node)

"""Who sends what to whom, by brute force: without messages, over one group of ranks and between two."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.arrangement import Arrangement
from distconv.communication.routes import Needs, Routes
from distconv.distribution import Distribution, Interval
from distconv.errors import DistributionError


def test_needs_end_where_the_tensor_does():
    base = Distribution(Arrangement(h=2), ("h", None))
    needs = Needs(base, ((0, (Interval(-1, 5), Interval(3, 9))),))
    assert [needs.intervals(0, index, 8) for index in (0, 1)] == [(Interval(0, 5),), (Interval(3, 8),)]
    assert needs.intervals(1, 0, 6) == (Interval(0, 6),)
    assert needs.intervals(0, 0, 0)[0].extent == 0


def blocks(whole, dist):
    """Return the blocks of ``whole`` on each rank of ``dist``, from the owners of each element."""
    found = []
    for rank in range(dist.grid.size):
        box = dist.box(rank, whole.shape)
        found.append(whole[tuple(slice(i.start, i.stop) for i in box)])
    return found


def delivered(src, dst, shape, sources, targets):
    """The blocks that arrive on the ranks of ``dst``, moved by hand along the routes that both sides work out."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    held = dict(zip(sources, blocks(whole, src), strict=True))
    everyone = sorted({*sources, *targets})
    routes = {rank: Routes(src, dst, shape, rank, sources=sources, targets=targets) for rank in everyone}
    messages = {}
    for rank in everyone:
        for peer in routes[rank].sends:
            messages[rank, peer.rank] = [held[rank][piece.src] for piece in peer.boxes]
    arrived = []
    for rank in targets:
        block = torch.full(routes[rank].destination_shapes[0], -1.0, dtype=torch.float64)
        for peer in routes[rank].receives:
            for piece, values in zip(peer.boxes, messages.pop((peer.rank, rank)), strict=True):
                assert (block[piece.dst] == -1).all(), "an element arrives twice"
                block[piece.dst] = values
        for piece in routes[rank].own:
            assert (block[piece.dst] == -1).all(), "an element arrives twice"
            block[piece.dst] = held[rank][piece.src]
        arrived.append(block)
    assert not messages, f"sent to ranks that do not expect it: {sorted(messages)}"
    for block, wanted in zip(arrived, blocks(whole, dst), strict=True):
        assert torch.equal(block, wanted)


def arrangements(ranks):
    """All ways to write ``ranks`` as n x c x h x r."""
    divisors = [k for k in range(1, ranks + 1) if ranks % k == 0]
    return [
        {"n": n, "c": c, "h": h, "r": ranks // (n * c * h)}
        for n, c, h in itertools.product(divisors, repeat=3)
        if ranks % (n * c * h) == 0
    ]


@st.composite
def layouts(draw, ranks):
    grid = Arrangement(**draw(st.sampled_from(arrangements(ranks))))
    axes = draw(st.permutations(["n", "c", "h", None, None]))[:3]
    return Distribution(grid, axes)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_groups_may_be_the_same_share_ranks_or_be_apart(data):
    shape = data.draw(st.tuples(*[st.integers(0, 7)] * 3))
    count, other = data.draw(st.sampled_from([(1, 1), (2, 3), (3, 2), (4, 4), (6, 4), (4, 6), (6, 6)]))
    shift = data.draw(st.integers(0, count))
    src, dst = data.draw(layouts(count)), data.draw(layouts(other))
    delivered(src, dst, shape, list(range(count)), list(range(shift, shift + other)))


def test_ranks_with_the_same_block_take_targets_in_turn():
    src = Distribution(Arrangement(r=2, h=3), ("h",))
    dst = Distribution(Arrangement(n=2, h=3), ("h",))
    senders = [
        peer.rank
        for target in range(6, 12)
        for peer in Routes(src, dst, (6,), target, sources=range(6), targets=range(6, 12)).receives
    ]
    assert sorted(senders) == [0, 1, 2, 3, 4, 5]


def test_a_rank_of_both_layouts_is_its_own_source_where_it_can_be():
    src = Distribution(Arrangement(r=2, h=2), ("h",))
    for rank in range(4):
        routes = Routes(src, src, (5,), rank)
        assert routes.sends == routes.receives == ()
        assert len(routes.own) == 1


def test_layouts_over_other_ranks_than_are_given_are_refused():
    src = Distribution(Arrangement(n=2), ("n",))
    dst = Distribution(Arrangement(n=3), ("n",))
    with pytest.raises(DistributionError, match="not the same ranks"):
        Routes(src, dst, (4,), 0)
    with pytest.raises(DistributionError, match="n=3 has 3, 2 are given"):
        Routes(src, dst, (4,), 0, sources=range(2), targets=range(2, 4))
    with pytest.raises(DistributionError, match="do not fit the shape"):
        Routes(src, src, (4, 4), 0)

"""Boundary tensors: how they are split over a stage's grid, and what crosses to the next."""

from __future__ import annotations

from distconv.arrangement import Arrangement
from distconv.pipeline.stage.resharding import boundary_routes, to_boundary
from tests.distconv.layouts import normal


def test_a_boundary_tensor_is_split_as_its_dimensions_say():
    to = boundary_routes(
        Arrangement(h=2), Arrangement(n=2, w=2), (4, 3, 6, 8), 2, sources=range(2), targets=range(2, 6)
    )
    assert to.destination_shapes == ((2, 3, 6, 4),)
    assert [(peer.rank, peer.numel) for peer in to.receives] == [(0, 2 * 3 * 3 * 4), (1, 2 * 3 * 3 * 4)]


def test_one_rank_and_one_rank_exchange_all_in_one_piece():
    shape = (2,) * 7  # more dimensions than have a default split
    send = boundary_routes(Arrangement(), Arrangement(), shape, 0, sources=range(1), targets=range(1, 2))
    (peer,) = send.sends
    assert (peer.rank, peer.numel, len(peer.boxes)) == (1, 2**7, 1)


def test_without_a_grid_a_value_crosses_as_it_is():
    x = normal(2, 3)
    assert to_boundary(x, None) is x

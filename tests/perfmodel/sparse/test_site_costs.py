"""Counts of sites, pairs and halos against those of ranks that really have them; times against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from distconv.arrangement import Arrangement
from distconv.errors import DistributionError
from distconv.layers import sparse
from distconv.layers.sparse import SparseTensor
from distconv.layers.sparse.distributed import DistributedManager
from distconv.perfmodel.machine.links import Link
from distconv.perfmodel.machine.machine import Compute, Roofline
from distconv.perfmodel.sparse.recording import record
from distconv.perfmodel.sparse.site_costs import SiteCosts, predict
from tests.distconv.layouts import grid_over
from tests.perfmodel.sparse.examples import cloud, machine, network, resnet


@pytest.mark.ranks(4, 6)
@pytest.mark.parametrize("axes", ["n", "d", "n,h", "h,w"])
@pytest.mark.parametrize("build", [network, resnet])
def test_counts_are_those_of_the_ranks(comm: Any, axes: str, build: Any) -> None:
    first, *rest = axes.split(",")
    parts = {first: comm.size // 2, rest[0]: 2} if rest else {first: comm.size}
    x, recording = cloud(), record(build(), cloud())
    costs = SiteCosts(recording, machine(), Arrangement(**parts))
    grid = grid_over(comm, **parts)
    split = sparse.scatter(SparseTensor(x.coords, x.features, batch_size=3), grid)
    build()(split)
    manager = split.coordinate_manager
    assert isinstance(manager, DistributedManager)
    pairs = [found.active_pairs for found in manager._maps.values()]
    sends = [{peer: len(rows) for peer, rows in halo.sends.items()} for halo in manager._halos.values()]
    most = torch.tensor(comm.allgather(pairs)).max(0).values.tolist()
    assert [costs.most_pairs(op.window, op.outputs) for op in costs.first_of_maps() if op.window] == most
    halos = {}
    for op in recording.operations:
        if op.window:
            halos.setdefault((op.inputs, op.window.low, op.window.high), costs.halo_rows(op)[comm.rank])
    counted = [{peer: int(n) for peer, n in enumerate(row) if n >= 0} for row in halos.values()]
    assert counted == sends


def test_arithmetic_is_two_flops_per_pair_channel_and_filter_three_times_over() -> None:
    recording = record(network(), cloud())
    work = 0
    for op in recording.operations:
        passes = 3 if op.input_gradient else 2
        if op.kind == "convolution" and op.window:
            work += passes * 2 * op.window.pairs.active_pairs * op.channels * op.filters
        if op.kind in ("linear", "head"):
            rows = 3 if op.kind == "head" else len(op.inputs.coords)
            work += passes * 2 * rows * op.channels * op.filters
    assert predict(recording, machine(flops=2.0), Arrangement()).compute == pytest.approx(work / 2)


def test_one_rank_exchanges_nothing_and_ranks_by_samples_send_no_features() -> None:
    recording = record(network(), cloud())
    alone, slow = predict(recording, machine(latency=1.0), Arrangement()), machine(latency=1.0)
    assert alone.halo == alone.sync == alone.allreduce == 0.0
    assert alone.pairs == 1.0
    by_samples, by_space = (predict(recording, slow, Arrangement(**{axis: 3})) for axis in "nd")
    assert by_samples.halo == 0.0 < by_space.halo
    assert by_samples.sync == by_space.sync > 0.0


def test_an_axis_that_cuts_nothing_is_refused() -> None:
    with pytest.raises(DistributionError, match="axis c splits none of them"):
        predict(record(network(), cloud()), machine(), Arrangement(c=2))


def test_memory_is_what_layers_put_out_and_maps_that_serve_both_ways_count_half() -> None:
    recording = record(network(), cloud())
    outputs = sum(
        len(op.outputs.coords) * op.filters * recording.itemsize for op in recording.operations if op.kind != "head"
    )
    windows = {op.window.key: op.window for op in recording.operations if op.window}
    maps = sum(2 * 8 * w.pairs.active_pairs / (1 if w.pairs.identity is None else 2) for w in windows.values())
    assert {window.pairs.identity is None for window in windows.values()} == {True, False}
    assert SiteCosts(recording, machine(), Arrangement()).memory() == outputs + maps


def test_batch_norm_sums_twice_and_a_linear_layer_has_two_products_on_its_way_back() -> None:
    recording, here = record(resnet(), cloud()), machine(latency=1.0, flops=2.0)
    costs = SiteCosts(recording, here, Arrangement(d=2))
    norms = [op for op in recording.operations if op.kind == "batch_norm"]
    assert norms
    for op in norms:
        assert costs.sync(op) == 2 * here.allreduce(costs.group, 2 * 4 * op.channels)
    products = [op for op in recording.operations if op.kind in ("linear", "head")]
    assert products and all(op.input_gradient for op in products)
    for op in products:
        assert costs.backward(op) == pytest.approx(2 * costs.forward(op)) != pytest.approx(0)


def test_half_of_the_offsets_of_a_map_are_searched_where_sites_meet_themselves() -> None:
    """With memory of 1 MB/s and kernels of a second: of each offset 12 indices of 8 bytes per site, and 6 kernels."""
    recording = record(network(), cloud())
    slow = replace(machine(), compute=(Compute(1, Roofline(1e30, 1e6, 1.0)),))
    costs = SiteCosts(recording, slow, Arrangement())
    for op in costs.first_of_maps():
        assert op.window is not None
        offsets = len(op.window.pairs.pairs)
        searched = offsets if op.window.pairs.identity is None else (offsets + 1) // 2
        assert costs.map_time(op) == pytest.approx(12 * 8 * searched * len(op.outputs.coords) / 1e6 + 6 * searched)


@pytest.mark.parametrize(("per_node", "latency"), [(2, 1.0), (1, 100.0)])
def test_a_halo_goes_over_the_network_only_between_nodes(per_node: int, latency: float) -> None:
    recording = record(network(), cloud())
    here = replace(machine(), ranks_per_node=per_node, node=Link(1.0, 1e30), network=Link(100.0, 1e30))
    costs = SiteCosts(recording, here, Arrangement(d=2))
    op = next(op for op in costs.first_of_maps() if costs.halo_rows(op).max() > 0)
    assert costs.halo(op) == pytest.approx((2 if op.input_gradient else 1) * latency, rel=0.1)

"""Counts of sites, pairs and halos against those of ranks that really have them; times against sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distconv.arrangement import Arrangement
from distconv.errors import DistributionError
from distconv.layers import sparse
from distconv.layers.sparse import SparseTensor
from distconv.layers.sparse.distributed import DistributedManager
from distconv.perfmodel.sparse.recording import record
from distconv.perfmodel.sparse.site_costs import SiteCosts
from distconv.perfmodel.sparse.step_prediction import predict
from tests.distconv.layouts import grid_over
from tests.perfmodel.sparse.examples import cloud, machine, network, resnet


@pytest.mark.ranks(2, 4, 6)
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


def test_halves_of_the_sites_take_half_the_memory() -> None:
    recording = record(resnet(), cloud(sites=2000, reach=20))
    whole, halves = (predict(recording, machine(), Arrangement(n=1, d=parts)).memory for parts in (1, 2))
    parameters = 3 * 8 * sum(op.parameters for op in recording.operations)
    assert 0.5 < (halves - parameters) / (whole - parameters) < 0.8


def test_an_axis_that_cuts_nothing_is_refused() -> None:
    with pytest.raises(DistributionError, match="axis c cuts none of them"):
        predict(record(network(), cloud()), machine(), Arrangement(c=2))

"""Running statistics of batch norm, kept once per mini-batch, against brute force over what each layer was given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from distconv.pipeline import Pipeline
from distconv.pipeline.stage.running_statistics import RunningStatistics
from tests.pipeline.training import SGD, Chain, assert_close, batches, convolutions, copies, states


def brute_force(stages, data, microbatches):
    """Train in one process with the statistics of all inputs of each layer, put together."""
    model = Chain(stages)
    updates = SGD(model.parameters())
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    seen = {layer: [] for layer in layers}
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, inputs: seen[layer].append(inputs[0].detach().clone()))
        layer.kept = layer.running_mean.clone(), layer.running_var.clone(), 0
    for x, target in data:
        updates.zero_grad()
        count = min(microbatches, len(x))
        for piece, its in zip(x.tensor_split(count), target.tensor_split(count), strict=True):
            (F.cross_entropy(model(piece), its) * (len(piece) / len(x))).backward()
        updates.step()
        for layer in layers:
            whole = torch.cat([each.transpose(0, 1).flatten(1) for each in seen[layer]], 1)
            mean, variance, number = layer.kept
            share = 1 / (number + 1) if layer.momentum is None else layer.momentum
            mean = (1 - share) * mean + share * whole.mean(1)
            variance = (1 - share) * variance + share * whole.var(1)
            layer.kept = mean, variance, number + 1
            seen[layer].clear()
    with torch.no_grad():
        for layer in layers:
            layer.running_mean.copy_(layer.kept[0])
            layer.running_var.copy_(layer.kept[1])
            layer.num_batches_tracked.fill_(layer.kept[2])
            layer._forward_pre_hooks.clear()


@pytest.mark.ranks(1, 3, 4)
def test_deferred_statistics_are_those_of_whole_mini_batches(comm):
    data = batches(3, [(7, 4, 4), (3, 6, 5), (2, 3, 3)])
    for replicas, name, options in {
        1: [((1,), "gpipe", {}), ((1,), "gpipe", {"weights": "recompute"})],
        3: [
            ((1, 2), "1f1b-so", {}),
            ((1, 2), "gpipe", {"weights": "recompute"}),
            ((1, 1, 1), "zero-bubble", {}),
            ((1, 1, 1), "interleaved", {"chunks": 2}),
        ],
        4: [((1, 3), "gpipe", {"weights": "recompute"}), ((2, 1, 1), "1f1b-sno", {})],
    }[comm.size]:
        stages = convolutions(len(replicas) * options.get("chunks", 1), inplace=False)
        alone = copies(stages)
        brute_force(alone, data, 3)
        pipe = Pipeline(stages, comm, name, F.cross_entropy, 3, replicas, SGD, batch_norm="deferred", **options)
        for batch in data:
            pipe.step(*batch)
        pipe.synchronize()
        assert_close(stages, alone, rtol=1e-11)
        pipe.close()


@pytest.mark.ranks(2)
def test_deferred_statistics_of_single_mini_batches_are_those_of_each(comm):
    # An asynchronous schedule has one micro-batch in each mini-batch: both ways give the same.
    found = []
    for batch_norm in ("micro", "deferred"):
        stages = convolutions(2)
        pipe = Pipeline(stages, comm, "stale", F.cross_entropy, optimizer=SGD, batch_norm=batch_norm)
        for batch in batches(6):
            pipe.step(*batch)
        pipe.drain()
        pipe.synchronize()
        found.append(stages)
        pipe.close()
    assert_close(*found, rtol=1e-12)


def layer_in(mode, **options):
    layer = nn.BatchNorm1d(2, **options).double()
    return layer.train(mode)


def test_layers_that_do_not_update_statistics_are_left_alone():
    x = torch.ones(4, 2).double() + torch.arange(4)[:, None]
    for layer in (layer_in(False), layer_in(True, track_running_stats=False)):
        before = copies(layer.state_dict())
        statistics = RunningStatistics([layer])
        with statistics.record_statistics(0):
            layer(x)
        assert statistics.records == []
        statistics.commit([], deferred=True)
        assert states([layer]).keys() == {f"0.{name}" for name in before}
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("deferred", [True, False])
def test_a_layer_that_is_called_twice_counts_both_calls(deferred):
    x, y = torch.randn(4, 2).double(), torch.randn(3, 2).double()
    layer, expected = layer_in(True), layer_in(True)
    statistics = RunningStatistics([layer])
    with statistics.record_statistics(0):
        assert torch.equal(layer(x), expected(x))
        layer(y)
    statistics.commit(statistics.records, deferred)
    expected = layer_in(True)
    if deferred:
        expected(torch.cat([x, y]))
    else:
        expected(x), expected(y)
    assert_close([layer], [expected], rtol=1e-12)


def test_micro_batches_count_in_their_order_whichever_rank_comes_first():
    x, y = torch.randn(4, 2).double(), 3 + torch.randn(3, 2).double()
    layer, expected = layer_in(True), layer_in(True)
    statistics = RunningStatistics([layer])
    for number, batch in enumerate((x, y)):
        with statistics.record_statistics(number):
            layer(batch)
        expected(batch)
    statistics.commit(statistics.records[::-1], deferred=False)
    assert_close([layer], [expected], rtol=1e-12)

"""Strategies: exact ones against brute force over candidates and ``evaluate``."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.layers.models import MODELS
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.selection import Strategy, pure_parallelism, select
from tests.perfmodel.networks import RandomNetwork, machine

MOST_COMBINATIONS = 700


def _case(seed):
    """A graph with few enough combinations to try them all, its ranks and machine."""
    draw = random.Random(seed)
    while True:
        layers, ranks = draw.choice([2, 3, 3, 4]), draw.choice([2, 3, 4, 6, 8, 12, 16])
        network = RandomNetwork(draw.randrange(10**6), layers)
        shape = (draw.choice([1, 2, 4, 8]), network.channels, draw.choice([12, 16, 31]), draw.choice([16, 32]))
        graph = trace(network, shape)
        options = candidates(graph, ranks)
        combinations = 1
        for found in options.values():
            combinations *= len(found)
        if combinations <= MOST_COMBINATIONS and all(len(found) >= 3 for found in options.values()):
            here = machine(overlap=draw.random() < 0.7, bandwidth=draw.choice([5e8, 2e9, 1e10]))
            return graph, options, ranks, here


def _brute_force(graph, options, ranks, here):
    tried = []
    for combination in itertools.product(*options.values()):
        plan = dict(zip(options, combination, strict=True))
        found = evaluate(graph, plan, here, ranks)
        tried.append((found.time, found.memory))
    return tried


def _check_against_brute_force(seed):
    """Check that the exact strategy is the best, with and without a limit. Return True if plans differ in cost."""
    graph, options, ranks, here = _case(seed)
    tried = _brute_force(graph, options, ranks, here)
    best, worst = min(time for time, _ in tried), max(time for time, _ in tried)
    strategy = select(graph, here, ranks)
    assert strategy.time == pytest.approx(best, rel=1e-12)
    assert strategy.optimal and strategy.gap <= 1e-9
    assert strategy.time <= select(graph, here, ranks, method="longest-path").time * (1 + 1e-12)
    sizes = sorted(size for _, size in tried)
    limit = sizes[len(sizes) // 5]
    fitting = min(time for time, size in tried if size <= limit)
    limited = select(graph, here, ranks, memory=limit)
    assert limited.time == pytest.approx(fitting, rel=1e-12)
    assert limited.memory <= limit and limited.optimal
    with pytest.raises(dc.PlanError, match="smallest limit that works is") as error:
        select(graph, here, ranks, memory=sizes[0] * 0.99)
    assert f"{sizes[0]:.0f} bytes" in str(error.value)
    return worst > 1.01 * best


@pytest.mark.long
def test_exact_strategies_are_the_best_of_all_combinations():
    assert sum(_check_against_brute_force(seed) for seed in range(8)) >= 6


@pytest.mark.parametrize("seed", range(3))
def test_the_layers_that_shard_their_weights_under_a_limit_are_the_best_of_all_combinations(seed: int) -> None:
    sizes = random.Random(seed).sample(range(200, 900), 4)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    graph, here = trace(model, (8, sizes[0])), machine(overlap=seed == 1, bandwidth=1e9)
    options = candidates(graph, 4)
    tried = []
    for combination in itertools.product(*options.values()):
        parts = dict(zip(options, combination, strict=True))
        for ways in itertools.product([False, True], repeat=len(options)):
            axes = {name: True for name, way in zip(options, ways, strict=True) if way}
            found = evaluate(graph, dc.Plan(parts, 4, shard_weights=axes), here, 4, optimizer_slots=2)
            tried.append((found.time, found.memory))
    sizes = sorted(size for _, size in tried)
    for limit in (sizes[0], sizes[len(sizes) // 8], sizes[len(sizes) // 2]):
        strategy = select(graph, here, 4, memory=limit, shard_weights="auto", optimizer_slots=2)
        assert strategy.time == pytest.approx(min(time for time, size in tried if size <= limit), rel=1e-12)
        assert strategy.memory <= limit and strategy.optimal
        again = evaluate(graph, strategy.plan, here, 4, optimizer_slots=2)
        assert (again.time, again.memory) == pytest.approx((strategy.time, strategy.memory), rel=1e-12)


def test_a_limit_that_only_sharded_weights_meet_names_them() -> None:
    # Seven groups do not divide over ranks, so no layer is split over channels.
    layers = [nn.Conv2d(448, 448, 3, padding=1, groups=7) for _ in range(6)]
    graph = trace(nn.Sequential(*layers), (4, 448, 3, 3))
    limit = 1.1 * evaluate(graph, {"*": {"n": 4}}, machine(), 4, shard_weights=True).memory
    with pytest.raises(dc.PlanError, match="or shard the weights"):
        select(graph, machine(), 4, memory=limit)
    strategy = select(graph, machine(), 4, memory=limit, shard_weights="auto")
    assert strategy.plan.shard_weights
    assert strategy.weights["sharded"].memory <= strategy.memory <= limit < strategy.weights["full"].memory
    assert "weights are sharded in" in strategy.explain() and "this plan with full weights" in strategy.explain()
    with pytest.raises(dc.PlanError, match="needs method='exact'"):
        select(graph, machine(), 4, memory=limit, shard_weights="auto", method="longest-path")


def test_a_plan_carries_the_statistics_of_batch_norm_that_it_was_chosen_for():
    graph = trace(MODELS["resnet20"].factory(), (16, 3, 32, 32))
    strategy = select(graph, machine(), 4, seconds=2, batch_norm="local")
    assert strategy.plan.batch_norm == "local"
    assert evaluate(graph, strategy.plan, machine(), 4).time == pytest.approx(strategy.time, rel=1e-12)
    as_global = evaluate(graph, strategy.plan, machine(), 4, batch_norm="global")
    assert as_global.time > strategy.time
    assert all(layer.sync == 0 for name, layer in strategy.prediction.layers.items() if name != "head")


def test_as_many_samples_as_ranks_are_pure_sample_parallelism_and_one_fewer_is_not():
    graph = trace(_one(), (4, 3, 8, 8))
    assert pure_parallelism(graph, 4)["sample"] == {"n": 4}
    assert pure_parallelism(graph, 5)["sample"] is None
    here = select(graph, machine(per_node=4), 4)
    assert here.uniform["sample"].time == evaluate(graph, {"*": {"n": 4}}, machine(per_node=4), 4).time


@pytest.mark.parametrize(("argument", "value"), [("method", "fastest"), ("memory", 0), ("memory", -1.0)])
def test_a_wrong_method_or_limit_is_named(argument, value):
    graph = trace(_one(), (2, 3, 8, 8))
    with pytest.raises(dc.PlanError, match=f"{argument}="):
        select(graph, machine(), 2, **{argument: value})


def _one():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))


def test_the_tightest_layer_of_a_limit_that_nothing_fits_is_the_one_with_most_memory():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 64, 1), torch.nn.Conv2d(64, 4, 1))
    graph = trace(network, (4, 3, 16, 16))
    with pytest.raises(dc.PlanError, match=r"tightest layer '1' \("):
        select(graph, machine(), 2, memory=10.0, memory_model="keep-all")


@pytest.mark.parametrize(
    ("known", "proven"),
    [
        ({"optimal": True, "bound": 1.0}, "proven the best"),
        ({"optimal": False, "bound": 1.0, "gap": 0.125}, "at most 12.50% above the best possible"),
        ({"optimal": False, "bound": 0.0}, "nothing proven"),
    ],
)
def test_a_strategy_is_explained_by_the_sums_of_its_layers(known, proven):
    layers = {
        name: SimpleNamespace(parts=parts, fp=1e-3 * i, bpx=2e-3, bpw=3e-3, bpa=4e-3, halo=5e-3, shuffle=6e-3)
        for i, (name, parts) in enumerate([("a", {"n": 2}), ("b", {"n": 2}), ("c", {"n": 2}), ("d", {"h": 2})], 1)
    }
    prediction = SimpleNamespace(layers=layers, hidden=7e-3, unknown=["digamma", "i0"])
    spatial = SimpleNamespace(time=0.06, memory=3e9)
    strategy = Strategy(
        **{
            "plan": dc.Plan({"*": {"n": 2}}),
            "time": 0.04,
            "memory": 2e9,
            "gap": 0.0,
            "method": "exact",
            "prediction": prediction,
        }
        | known,
        uniform={"sample": None, "spatial": spatial},
        impossible={"sample": "1 samples for 2 ranks"},
        limit=2.5e9,
    )
    assert strategy.explain().splitlines() == [
        f"40.000 ms per step (exact: {proven}), 2.000 GB per rank, 7.000 ms of communication hidden",
        "  pure sample parallelism: not possible, 1 samples for 2 ranks",
        "  pure spatial parallelism: 60.000 ms (1.500 x), 3.000 GB (does not fit)",
        f"  {'layers':<44} {'distribution':<18}       FP      BPx      BPw      BPa     halo  shuffle  ms",
        f"  {'a ... c (3)':<44} {'n=2':<18}    6.000    6.000    9.000   12.000   15.000   18.000",
        f"  {'d':<44} {'h=2':<18}    4.000    2.000    3.000    4.000    5.000    6.000",
        "  estimated by the memory that they touch (see register_cost): digamma, i0",
    ]


def test_spatial_parallelism_takes_the_cheapest_split_that_the_shapes_allow():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 2, 1))
    large, small = trace(model, (2, 3, 64, 64)), trace(model, (2, 3, 16, 16))
    assert pure_parallelism(large, 16) == {"sample": None, "spatial": {"h": 4, "w": 4}}
    assert pure_parallelism(small, 2) == {"sample": {"n": 2}, "spatial": {"w": 2}}
    assert pure_parallelism(trace(model, (1, 3, 1, 1)), 4) == {"sample": None, "spatial": None}
    assert pure_parallelism(small, 1) == {"sample": {"n": 1}, "spatial": {}}

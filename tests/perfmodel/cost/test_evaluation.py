"""Predictions against the formulas of the paper worked out by hand, and their tables against single evaluations."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from torch import nn

import distconv as dc
from distconv.layers.models import MODELS
from distconv.perfmodel.cost.assumptions import Settings, SettingsError
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import StepModel, evaluate
from distconv.perfmodel.cost.operation_cost import OperationCosts
from distconv.perfmodel.graph.tracing import trace
from tests.perfmodel.networks import FLOPS, KERNEL, RandomNetwork, machine, plain


def _reference_prediction(graph, plan, here, ranks, settings):
    """The step of a chain: operation after operation, allreduces one at a time behind what follows (V-B)."""
    costs = OperationCosts(here, ranks, settings)
    grids = {name: AxisParts.from_axes(parts, ranks, here.ranks_per_node) for name, parts in plan.items()}
    clock = end = 0.0
    for op in graph.operations:
        cost = costs.operation(op, grids[op.layer])
        clock += cost.update + cost.forward
        for value in op.inputs:
            clock += costs.shuffle(value, grids[graph.layer_of(value)], grids[op.layer])
    for op in reversed(graph.operations):
        cost = costs.operation(op, grids[op.layer])
        clock += cost.backward
        if cost.bpa and costs.overlap_allreduce:
            end = max(end, clock) + cost.bpa
        else:
            clock += cost.bpa
        for value in op.inputs:
            if value.requires_grad:
                clock += costs.shuffle(value, grids[op.layer], grids[graph.layer_of(value)])
    return max(clock, end)


@pytest.mark.parametrize("overlap", [True, False])
def test_tables_evaluations_and_the_formula_by_hand_agree(overlap):
    draw = random.Random(5)
    for seed in range(12):
        network = RandomNetwork(seed, 5)
        graph = trace(network, (4, network.channels, 16, 18))
        ranks, here = draw.choice([2, 4, 6]), machine(overlap=overlap, bandwidth=2e8)
        options = candidates(graph, ranks)
        problem = StepModel.cached(graph, here, ranks, Settings()).problem(options)
        for _ in range(5):
            choices = [draw.randrange(len(found)) for found in options.values()]
            plan = {name: options[name][i] for name, i in zip(options, choices, strict=True)}
            found = evaluate(graph, plan, here, ranks)
            assert found.time == pytest.approx(_reference_prediction(graph, plan, here, ranks, Settings()), rel=1e-12)
            assert float(problem.times(np.array(choices))) == pytest.approx(found.time, rel=1e-12)
            assert float(problem.memories(np.array(choices))) == pytest.approx(found.memory, rel=1e-12)


def test_a_step_of_two_products_is_the_sum_of_its_parts_in_numbers():
    """Nothing here comes from the code: 1x1 convolutions over samples, then over rows, on links of 1 MB/s."""
    layers = nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 2, 1, bias=False)
    graph = trace(nn.Sequential(*layers), (4, 4, 8, 8))
    found = evaluate(graph, {"0": {"n": 2}, "1": {"h": 2}}, plain(), 2)
    first, second = 2 * (2 * 8 * 8) * 8 * 4 / FLOPS, 2 * (4 * 4 * 8) * 2 * 8 / FLOPS  # a rank's half
    computed = 2 * first + 3 * second + 5 * KERNEL  # x needs no gradient
    updates = 2 * KERNEL
    # y and its gradient: a rank receives half of its new half, 256 x 2 elements; two kernels copy at no cost of memory.
    shuffles = 2 * (1e-4 + 4 * 512 / 1e6 + 2 * KERNEL)
    reductions = sum(1e-4 + 4 * weights / 1e6 for weights in (32, 16))  # two ranks: one exchange each
    assert found.time == pytest.approx(computed + updates + shuffles + reductions, rel=1e-9)


def test_sharded_weights_are_gathered_twice_and_their_gradients_reduce_scattered_in_numbers():
    """Nothing here comes from the code: two 1x1 convolutions over samples on links of 1 MB/s and 0.1 ms."""
    layers = nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 2, 1, bias=False)
    graph = trace(nn.Sequential(*layers), (4, 4, 8, 8))
    full = evaluate(graph, {"*": {"n": 2}}, plain(), 2, optimizer_slots=2)
    found = evaluate(graph, {"*": {"n": 2}}, plain(), 2, optimizer_slots=2, shard_weights=True)
    # Two ranks exchange halves: in gathers and in the reduce-scatter. An all-reduce sends the whole. The weights of the
    # last layer are gathered once, since backward begins with it.
    gathers = [times * (1e-4 + 4 * weights / 2 / 1e6) for times, weights in ((2, 32), (1, 16))]
    assert [layer.gather for layer in found.layers.values()] == pytest.approx(gathers)
    sums = [1e-4 + 4 * weights / 2 / 1e6 for weights in (32, 16)]
    assert [layer.bpa for layer in found.layers.values()] == pytest.approx(sums)
    reductions = sum(1e-4 + 4 * weights / 1e6 for weights in (32, 16))
    assert found.time - full.time == pytest.approx(sum(gathers) + sum(sums) - reductions)
    assert found.lasting == full.lasting / 2 == 3 * 4 * (32 + 16) / 2


def test_memory_of_sharded_weights_is_that_of_the_blocks_and_of_what_is_gathered():
    """Four linear layers whose activations are small: the third one's backward pass takes the most."""
    sizes = (700, 800, 900, 1000, 100)
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
    graph = trace(nn.Sequential(*layers), (4, 700))
    full, found = (
        evaluate(graph, {"*": {"n": 4}}, plain(), 4, optimizer_slots=2, shard_weights=axes).memory
        for axes in (False, "n")
    )
    elements = [a * b for a, b in itertools.pairwise(sizes)]
    # In backward of the third layer: its weights and those of the second one, its gradients, and the reduce-scatter of
    # the fourth one, which is small. In backward of the second: the reduce-scatter of the third one.
    gathered = max(
        elements[1] + elements[0] + elements[1] + 1.75 * elements[2],
        elements[2] + elements[1] + elements[2] + 1.75 * elements[3],
    )
    activations = 4 * sum(sizes)
    assert full == pytest.approx(16 * sum(elements), abs=2 * activations)
    assert found == pytest.approx(16 * sum(elements) / 4 + 4 * gathered, abs=2 * activations)


def test_tables_and_evaluations_with_sharded_weights_agree():
    draw = random.Random(8)
    for seed in range(6):
        network = RandomNetwork(seed, 4)
        graph = trace(network, (4, network.channels, 16, 18))
        ranks, here = draw.choice([2, 4, 6]), machine(overlap=draw.random() < 0.5, bandwidth=2e8)
        options = candidates(graph, ranks)
        problem = StepModel.cached(graph, here, ranks, Settings()).problem(options, (False, True))
        for _ in range(5):
            choices = [draw.randrange(len(found)) for found in options.values()]
            sharded = [draw.randrange(2) for _ in options]
            parts = {name: options[name][i] for name, i in zip(options, choices, strict=True)}
            axes = {name: True for name, way in zip(options, sharded, strict=True) if way}
            found = evaluate(graph, dc.Plan(parts, ranks, shard_weights=axes), here, ranks)
            assert float(problem.times(np.array(choices + sharded))) == pytest.approx(found.time, rel=1e-12)
            assert float(problem.memories(np.array(choices + sharded))) == pytest.approx(found.memory, rel=1e-12)


@pytest.mark.parametrize("wrong", [{"memory_model": "all"}, {"batch_norm": "none"}, {"workspace": -1.0}])
def test_an_assumption_that_cannot_be_is_refused(wrong):
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        evaluate(graph, {"*": {"n": 2}}, machine(), 2, **wrong)

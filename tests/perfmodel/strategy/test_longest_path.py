"""The paper's selector against all combinations along a chain, and what it does beside the longest path."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.candidates import candidates
from distconv.perfmodel.cost.evaluation import StepModel
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.strategy.longest_path import longest_path
from tests.perfmodel.networks import machine


def chain():
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 4, 5)]
    return trace(nn.Sequential(*layers), (4, 8, 16, 18))


def along_a_chain(model, plan):
    """Each operation by itself with its allreduce, and shuffles there and back (V-C)."""
    total, costs = 0.0, model.costs
    for op in model.graph.operations:
        here = model.parts(plan[op.layer])
        cost = costs.operation(op, here)
        total += cost.update + cost.forward + cost.backward + cost.bpa
        for value in op.inputs:
            there = model.parts(plan[model.graph.layer_of(value)])
            total += costs.shuffle(value, there, here)
            total += costs.shuffle(value, here, there) if value.requires_grad else 0.0
    return total


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bandwidth", [2e7, 2e8, 2e9])
def test_the_choice_along_a_chain_is_the_best_of_all(overlap, bandwidth):
    graph = chain()
    model = StepModel.cached(graph, machine(overlap=overlap, bandwidth=bandwidth), 4, Settings())
    options = candidates(graph, 4)
    best = min(
        along_a_chain(model, dict(zip(options, plan, strict=True))) for plan in itertools.product(*options.values())
    )
    found = longest_path(model, options)
    chosen = {name: options[name][index] for name, index in found.items()}
    assert along_a_chain(model, chosen) == pytest.approx(best, rel=1e-12)


class Branch(nn.Module):
    """A long path and a convolution beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.beside = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.first(x)
        return self.third(torch.relu(self.second(y))) + self.beside(y)


def test_a_layer_beside_the_longest_path_follows_what_was_chosen_there():
    graph = trace(Branch(), (4, 4, 16, 18))
    model, options = StepModel.cached(graph, machine(bandwidth=2e7), 4, Settings()), candidates(graph, 4)
    found = longest_path(model, options)
    assert set(found) == set(graph.deciding)
    fixed = {name: options[name][found[name]] for name in ("first", "second", "third")}

    def time(candidate):
        """Return the cost that depends on the neighbouring layer alone: its own, and its input from ``first``."""
        (op,) = graph.by_layer["beside"]
        here, there = model.parts(candidate), model.parts(fixed["first"])
        cost, costs = model.costs.operation(op, here), model.costs
        own = cost.update + cost.forward + cost.backward + cost.bpa
        return own + costs.shuffle(op.x, there, here) + costs.shuffle(op.x, here, there)

    assert time(options["beside"][found["beside"]]) == pytest.approx(min(map(time, options["beside"])), rel=1e-12)


def test_a_high_price_on_memory_buys_the_least_of_it():
    graph = trace(nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU()), (4, 8, 16, 18))
    model, options = StepModel.cached(graph, machine(), 4, Settings(memory_model="keep-all")), candidates(graph, 4)
    sizes = [model.predict({"0": candidate})[1] for candidate in options["0"]]
    assert len(set(sizes)) > 1
    assert sizes[longest_path(model, options, 1.0)["0"]] == min(sizes)
    times = [along_a_chain(model, {"0": candidate}) for candidate in options["0"]]
    assert times[longest_path(model, options, 0.0)["0"]] == min(times)

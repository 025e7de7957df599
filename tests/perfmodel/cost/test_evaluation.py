"""Predictions against the formulas of the paper worked out by hand, and their tables against single evaluations."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import distconv as dc
from distconv.layers.models import MODELS
from distconv.perfmodel.cost import operation_work as work_module
from distconv.perfmodel.cost.assumptions import Settings, SettingsError
from distconv.perfmodel.cost.block_geometry import Parts
from distconv.perfmodel.cost.evaluation import Model, evaluate
from distconv.perfmodel.cost.operation_cost import Costs
from distconv.perfmodel.cost.operation_work import Work, local_call, register_cost
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.links import Group, Link
from distconv.perfmodel.machine.machine import Compute, Machine, Overlap, Roofline
from distconv.perfmodel.strategy.candidates import candidates
from tests.perfmodel.networks import RandomNetwork, machine

FLOPS, KERNEL = 1e9, 1e-5


def plain(*, halo: bool = False, allreduce: bool = False, ranks_per_node: int = 4) -> Machine:
    """Memory costs nothing here: what is left are FLOPs, kernels and messages."""
    compute = Compute(1, Roofline(FLOPS, 1e30, KERNEL))
    near, far = Link(1e-4, 1e6), Link(3e-4, 1e5)
    return Machine(
        name="plain",
        ranks_per_node=ranks_per_node,
        memory_bytes=1e9,
        node=near,
        network=far,
        overlap=Overlap(halo, allreduce),
        compute=(compute,),
    )


def convolution(kernel=3, bias=False):
    return nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 8, kernel, padding=kernel // 2, bias=bias))


def test_a_convolution_costs_what_the_paper_says():
    """FP, BPx and BPw of a block, 2 SR north/south, 2 SR east/west and 4 SR of corners, AR over all ranks (V-A)."""
    graph = trace(convolution(5), (3, 4, 32, 16))
    here = plain(ranks_per_node=9)
    # 9 ranks: those in the middle have all eight neighbours.
    cost = Costs(here, 9, Settings()).operation(graph.operations[1], Parts.of({"h": 3, "w": 3}, 9, 9))
    height, width = math.ceil(32 / 3), math.ceil(16 / 3)
    flops = 2 * 3 * 8 * height * width * 4 * 25
    assert cost.fp == pytest.approx(KERNEL + flops / FLOPS, rel=1e-12)
    assert cost.bpx == cost.fp and cost.bpw == cost.fp

    def sr(elements):
        return 1e-4 + 4 * elements / 1e6 + 2 * KERNEL  # with packing and unpacking

    halo = 2 * sr(2 * 3 * 4 * width) + 2 * sr(2 * 3 * 4 * height) + 4 * sr(2 * 2 * 3 * 4)
    assert cost.halo_forward == pytest.approx(halo, rel=1e-12)
    assert cost.halo_backward == pytest.approx(halo, rel=1e-12)
    assert cost.forward == pytest.approx(cost.fp + halo, rel=1e-12)
    assert cost.before_reduce == pytest.approx(cost.bpw + halo, rel=1e-12) and cost.after_reduce == cost.bpx
    assert cost.bpa == here.allreduce(Group(9, 9), 8 * 4 * 25 * 4)


def test_sample_parallelism_needs_the_allreduce_alone():
    graph = trace(convolution(), (8, 4, 16, 16))
    cost = Costs(plain(), 4, Settings()).operation(graph.operations[1], Parts.of({"n": 4}, 4, 4))
    assert cost.halo_forward == cost.halo_backward == cost.sync_forward == cost.sync_backward == 0
    assert cost.bpa > 0


def test_the_first_layer_has_no_gradient_of_its_input_and_replicas_reduce_nothing():
    graph = trace(convolution(), (8, 4, 16, 16))
    cost = Costs(plain(), 4, Settings()).operation(graph.operations[0], Parts.of({"r": 4}, 4, 4))
    assert cost.bpx == 0 and cost.bpw > 0 and cost.bpa == 0


def test_uneven_blocks_cost_what_the_largest_costs():
    graph = trace(convolution(1), (1, 4, 7, 8))
    cost = Costs(plain(), 2, Settings()).operation(graph.operations[1], Parts.of({"h": 2}, 2, 2))
    assert cost.fp == pytest.approx(KERNEL + 2 * 8 * 4 * 8 * 4 / FLOPS, rel=1e-12)


def test_neighbours_on_another_node_are_further_away():
    graph = trace(convolution(), (1, 4, 64, 64))
    op = graph.operations[1]
    together = Costs(plain(ranks_per_node=8), 8, Settings()).operation(op, Parts.of({"h": 8}, 8, 8))
    apart = Costs(plain(ranks_per_node=2), 8, Settings()).operation(op, Parts.of({"h": 8}, 8, 2))
    row = 4 * 4 * 64
    assert apart.halo_forward - together.halo_forward == pytest.approx(2e-4 + row * (1e-5 - 1e-6), rel=1e-9)


def test_hidden_halos_cost_only_what_computation_does_not_cover():
    graph = trace(convolution(), (1, 4, 64, 64))
    parts = Parts.of({"h": 4}, 4, 4)
    hidden = Costs(plain(halo=True), 4, Settings()).operation(graph.operations[1], parts)
    shown = Costs(plain(), 4, Settings()).operation(graph.operations[1], parts)
    assert hidden.halo_forward == shown.halo_forward
    assert hidden.before_reduce == max(hidden.bpw, hidden.halo_backward) < shown.before_reduce
    assert hidden.forward < shown.forward


def _by_hand(graph, plan, here, ranks, settings):
    """The step of a chain: operation after operation, allreduces one at a time behind what follows (V-B)."""
    costs = Costs(here, ranks, settings)
    grids = {name: Parts.of(parts, ranks, here.ranks_per_node) for name, parts in plan.items()}
    clock = end = 0.0
    for op in graph.operations:
        cost = costs.operation(op, grids[op.layer])
        clock += cost.update + cost.forward
        for value in op.inputs:
            clock += costs.shuffle(value, grids[graph.layer_of(value)], grids[op.layer])
    for op in reversed(graph.operations):
        cost = costs.operation(op, grids[op.layer])
        clock += cost.before_reduce
        if cost.bpa and costs.overlap_allreduce:
            end = max(end, clock) + cost.bpa
        else:
            clock += cost.bpa
        clock += cost.after_reduce
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
        problem = Model.of(graph, here, ranks, Settings()).problem(options)
        for _ in range(5):
            choices = [draw.randrange(len(found)) for found in options.values()]
            plan = {name: options[name][i] for name, i in zip(options, choices, strict=True)}
            found = evaluate(graph, plan, here, ranks)
            assert found.time == pytest.approx(_by_hand(graph, plan, here, ranks, Settings()), rel=1e-12)
            assert float(problem.times(np.array(choices))) == pytest.approx(found.time, rel=1e-12)
            assert float(problem.memories(np.array(choices))) == pytest.approx(found.memory, rel=1e-12)


def test_a_prediction_adds_up_when_nothing_is_hidden():
    graph = trace(MODELS["resnet20"].factory(), (8, 3, 32, 32))
    found = evaluate(graph, {"*": {"n": 2, "h": 2}}, machine(overlap=False), 4)
    assert sum(layer.spent for layer in found.layers.values()) == pytest.approx(found.time, rel=1e-9)
    assert found.hidden == pytest.approx(0, abs=1e-9 * found.time)


def test_layers_that_a_plan_leaves_out_stay_on_the_grid_of_their_input():
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    left_out = evaluate(graph, {"c1": {"n": 2}}, machine(), 2)
    assert all(layer.parts == {"n": 2} for layer in left_out.layers.values())
    assert left_out.time == evaluate(graph, dc.Plan({"*": {"n": 2}}), machine(), 2).time


def test_less_bandwidth_and_more_latency_never_make_a_step_faster():
    graph = trace(MODELS["unet"].factory(), (2, 18, 64, 64))
    plan = {"*": {"h": 4}, "down.2.*": {"n": 2, "c": 2}}
    times = [evaluate(graph, plan, machine(latency_s=s, bandwidth=b), 4).time for s, b in [(1e-6, 1e10), (1e-5, 1e9)]]
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("plan", "ranks", "text"),
    [
        ({"nothing*": {"n": 2}}, 2, "'nothing\\*' matches no layer of LeNet5"),
        ({"*": {"x": 2}}, 2, "unknown axis 'x'"),
        ({"*": {"n": 3}}, 4, "3 parts, which do not divide the 4 ranks"),
        ({"*": {"d": 2}}, 2, "split along d"),
        ({"*": {"n": 0}}, 2, "positive whole number"),
        ({"c3": {"n": 2}}, 2, "'c1', where the input arrives"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(plan, ranks, text):
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(dc.PlanError, match=text) as error:
        evaluate(graph, plan, machine(), ranks)
    assert "\n" not in str(error.value)


def test_a_plan_for_other_ranks_or_groups_that_do_not_divide_is_refused():
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(dc.PlanError, match="made for 8 ranks, not for 4"):
        evaluate(graph, dc.Plan({"*": {"n": 4}}, ranks=8), machine(), 4)
    grouped = trace(nn.Sequential(nn.Conv2d(6, 6, 3, groups=3)), (2, 6, 8, 8))
    with pytest.raises(dc.PlanError, match="groups=3 do not divide over c=2"):
        evaluate(grouped, {"*": {"c": 2}}, machine(), 2)


@pytest.mark.parametrize("wrong", [{"memory_model": "all"}, {"batch_norm": "none"}, {"workspace": -1.0}])
def test_an_assumption_that_cannot_be_is_refused(wrong):
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        evaluate(graph, {"*": {"n": 2}}, machine(), 2, **wrong)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return torch.logcumsumexp(self.conv(x), 3)


def test_unknown_functions_are_listed_and_priced_as_registered(monkeypatch):
    monkeypatch.setattr(work_module, "_registered", {})
    graph, here = trace(Odd(), (4, 4, 8, 8)), plain()
    before = evaluate(graph, {"*": {"n": 2}}, here, 2)
    assert before.unknown == ("logcumsumexp (logcumsumexp)",)
    register_cost("logcumsumexp", lambda call: (Work(flops=1e6 * call.outputs[0][0]), Work(flops=2e6)))
    after = evaluate(graph, {"*": {"n": 2}}, here, 2)
    assert after.unknown == ()
    assert after.time - before.time == pytest.approx((2e6 + 2e6) / FLOPS, rel=1e-9)


def test_measured_times_come_before_the_roofline():
    graph = trace(convolution(), (2, 4, 8, 8))
    costs = Costs(plain(), 1, Settings())
    op, alone = graph.operations[1], Parts(1, 4)
    key = local_call(op, alone).key
    here = plain()
    table = Compute(1, here.compute[0].roofline, {f"{key} forward": 0.25, f"{key} weight": 0.5})
    measured = Costs(
        Machine(
            name=here.name,
            ranks_per_node=4,
            memory_bytes=1e9,
            node=here.node,
            network=here.network,
            overlap=here.overlap,
            compute=(table,),
        ),
        1,
        Settings(),
    ).operation(op, alone)
    assert (measured.fp, measured.bpw) == (0.25, 0.5)
    assert measured.bpx == costs.operation(op, alone).bpx


def test_candidates_use_all_ranks_where_that_is_possible_and_hold_the_pure_ones():
    graph = trace(MODELS["resnet50"].factory(), (32, 3, 224, 224))
    for ranks in (2, 6, 16, 64):
        for name, found in candidates(graph, ranks).items():
            assert len(found) >= 3 and len({tuple(sorted(parts.items())) for parts in found}) == len(found)
            assert all(ranks % math.prod(parts.values()) == 0 for parts in found)
            op = graph.by_layer[name][0]
            if ranks <= 32:
                assert {"n": ranks} in found
            if op.x.shape[2] >= ranks and op.y.shape[2] >= ranks:
                assert {"h": ranks} in found
            evaluate(graph, {"*": {"n": 1}, name: found[0]}, machine(), ranks)


def test_a_layer_that_cannot_use_all_ranks_leaves_replicas():
    graph = trace(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3)), (1, 1, 2, 2))
    found = candidates(graph, 16)
    assert max(math.prod(parts.values()) for parts in found["0"]) < 16
    assert found["2"] and all(16 % math.prod(parts.values()) == 0 for parts in found["2"])


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_ranks_must_be_a_positive_number(ranks):
    graph = trace(MODELS["lenet5"].factory(), (8, 1, 28, 28))
    with pytest.raises(dc.PlanError, match="ranks="):
        candidates(graph, ranks)


def test_exchanges_and_redistributions_have_a_fixed_cost():
    graph = trace(convolution(), (4, 4, 16, 16))
    here = plain()
    slow = replace(
        here, compute=(replace(here.compute[0], roofline=replace(here.compute[0].roofline, exchange_s=0.5)),)
    )
    op, two = graph.operations[1], Parts.of({"h": 2}, 2, 4)
    costs = [Costs(machine, 2, Settings()) for machine in (here, slow)]
    halos = [cost.operation(op, two).halo_forward for cost in costs]
    moves = [cost.shuffle(op.x, Parts.of({"n": 2}, 2, 4), two) for cost in costs]
    assert halos[1] - halos[0] == pytest.approx(0.5) and moves[1] - moves[0] == pytest.approx(0.5)
    assert costs[1].operation(op, Parts.of({"n": 2}, 2, 4)).halo_forward == 0

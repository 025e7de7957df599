"""Costs of operations against the formulas of the paper worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch import nn

from distconv.perfmodel.cost.assumptions import Settings
from distconv.perfmodel.cost.block_geometry import AxisParts
from distconv.perfmodel.cost.operation_cost import OperationCosts
from distconv.perfmodel.cost.operation_work import local_call
from distconv.perfmodel.graph.tracing import trace
from distconv.perfmodel.machine.links import RankGroup
from distconv.perfmodel.machine.machine import Compute, Machine, Roofline
from tests.perfmodel.networks import FLOPS, KERNEL, plain


def convolution(kernel=3, bias=False):
    return nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 8, kernel, padding=kernel // 2, bias=bias))


def test_a_convolution_costs_what_the_paper_says():
    """FP, BPx and BPw of a block, 2 SR north/south, 2 SR east/west and 4 SR of corners, AR over all ranks (V-A)."""
    graph = trace(convolution(5), (3, 4, 32, 16))
    here = plain(ranks_per_node=9)
    # 9 ranks: those in the middle have all eight neighbours.
    cost = OperationCosts(here, 9, Settings()).operation(
        graph.operations[1], AxisParts.from_axes({"h": 3, "w": 3}, 9, 9)
    )
    height, width = math.ceil(32 / 3), math.ceil(16 / 3)
    flops = 2 * 3 * 8 * height * width * 4 * 25
    assert cost.fp == pytest.approx(KERNEL + flops / FLOPS, rel=1e-12)
    assert cost.bpx == cost.fp and cost.bpw == cost.fp

    def sr(elements):
        return 1e-4 + 4 * elements / 1e6

    halo = 2 * sr(2 * 3 * 4 * width) + 2 * sr(2 * 3 * 4 * height) + 4 * sr(2 * 2 * 3 * 4)
    assert cost.halo_forward == pytest.approx(halo, rel=1e-12)
    assert cost.halo_backward == pytest.approx(halo, rel=1e-12)
    assert cost.forward == pytest.approx(cost.fp + halo, rel=1e-12)
    assert cost.backward == pytest.approx(cost.bpx + cost.bpw + halo, rel=1e-12)
    assert cost.bpa == here.allreduce(RankGroup(9, 9), 8 * 4 * 25 * 4)


def middle_of_four(here: Machine, kernel_s: float):
    """A convolution over 4 slabs of 16 of 64 rows, with the seconds of its arithmetic and of its exchange."""
    graph = trace(convolution(), (1, 4, 64, 64))
    roofline = replace(here.compute[0].roofline, kernel_s=kernel_s)
    here = replace(here, compute=(replace(here.compute[0], roofline=roofline),))
    cost = OperationCosts(here, 4, Settings()).operation(graph.operations[1], AxisParts.from_axes({"h": 4}, 4, 4))
    return cost, 2 * 8 * 4 * 9 * 16 * 64 / FLOPS, 2 * (1e-4 + 4 * 4 * 64 / 1e6)


def test_hidden_halos_cost_only_what_computation_does_not_cover():
    """The interior, 14 of 16 rows, while halos travel, then two strips; backward the strips first (IV-A)."""
    kernel = 1e-5
    cost, arithmetic, exchange = middle_of_four(plain(halo=True), kernel)
    assert cost.halo_forward == pytest.approx(exchange, rel=1e-12)
    inside, strips = kernel + arithmetic * 14 / 16, 2 * kernel + arithmetic * 2 / 16
    assert exchange > inside + kernel  # something is left to be seen, forward
    assert cost.forward == pytest.approx(max(inside, exchange) + strips, rel=1e-12)
    assert cost.forward < exchange + kernel + arithmetic
    assert cost.backward == pytest.approx(strips + max(inside + kernel + arithmetic, exchange), rel=1e-12)
    shown = middle_of_four(plain(), kernel)[0]
    assert shown.forward == pytest.approx(exchange + kernel + arithmetic, rel=1e-12)
    assert shown.backward == pytest.approx(exchange + 2 * (kernel + arithmetic), rel=1e-12)


def test_measured_times_come_before_the_roofline():
    graph = trace(convolution(), (2, 4, 8, 8))
    costs = OperationCosts(plain(), 1, Settings())
    op, alone = graph.operations[1], AxisParts(1, 4)
    key = local_call(op, alone).key
    here = plain()
    table = Compute(1, here.compute[0].roofline, {f"{key} forward": 0.25, f"{key} weight": 0.5})
    measured = OperationCosts(
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


def test_a_shuffle_costs_the_bytes_of_its_elements_whatever_was_asked_before():
    # From halves of four samples to halves of eight rows: a rank keeps 2 x 4 x 4 x 8 elements and receives as many.
    here, moved, kept = plain(), 256, 256
    here = replace(here, compute=(Compute(1, Roofline(FLOPS, 1e7, KERNEL, exchange_s=2e-5)),))
    costs = OperationCosts(here, 2, Settings())
    source, target = AxisParts.from_axes({"n": 2}, 2, 4), AxisParts.from_axes({"h": 2}, 2, 4)
    value = trace(convolution(), (4, 4, 8, 8)).operations[0].x
    for size in (4, 8, 2, 4):
        copied = 2 * moved * size + kept * size  # packed and put in place; what is kept is copied once
        seconds = 1e-4 + moved * size / 1e6 + 2 * KERNEL + 2 * 2.0 * copied / 1e7 + 2e-5
        assert costs.shuffle(replace(value, itemsize=size), source, target) == pytest.approx(seconds, rel=1e-12)


def test_a_share_of_a_measured_time_takes_its_share_and_a_kernel_for_each_further_piece():
    op, parts = trace(convolution(), (1, 4, 64, 64)).operations[1], AxisParts.from_axes({"h": 4}, 4, 4)
    call = local_call(op, parts)
    here = replace(plain(), compute=(replace(plain().compute[0], table={f"{call.key} forward": 0.5}),))
    costs = OperationCosts(here, 4, Settings())
    assert costs.compute(call, "forward") == 0.5
    assert costs.compute(call, "forward", 0.25, 3) == pytest.approx(0.25 * 0.5 + 2 * KERNEL, rel=1e-12)

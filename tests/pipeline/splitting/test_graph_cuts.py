"""Graphs of steps, cut: what goes from one piece to the next, and where that cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from distconv.pipeline.splitting.graph_cuts import SplitError, computing_positions, cut_graph, cut_test
from tests.pipeline.splitting.modules import linears, model_of


def graph_of(forward, **modules):
    model = model_of(forward, **modules)
    return fx.symbolic_trace(model).graph, model


def run(graph, model, *values):
    found = fx.Interpreter(model, graph=graph).run(*values)
    return found if isinstance(found, tuple) else (found,)


def residual(self, x):
    a = self.a(x)
    b = self.b(a)
    return self.c(b) + a + self.shift


def test_pieces_hand_on_what_lives_across_a_cut_the_latest_first():
    graph, model = graph_of(residual, shift=torch.ones(3), **linears("a", "b", "c"))
    _, b, c, *_ = computing_positions(graph)
    pieces = cut_graph(graph, [b, c])
    given = [[node.name for node in piece.nodes if node.op == "placeholder"] for piece in pieces]
    assert given == [["x"], ["a"], ["b", "a"]]
    values = (x := torch.randn(2, 3),)
    for piece in pieces:
        values = run(piece, model, *values)
    assert torch.equal(values[0], model(x))


def test_numbers_go_from_piece_to_piece_and_devices_do_not():
    graph, model = graph_of(lambda self, x: self.b(self.a(x)).to(x.device).view(x.size(0), -1), **linears("a", "b"))
    names = {node.name: index for index, node in enumerate(graph.nodes)}
    possible = cut_test(graph, model)
    # The device is read after b and used by to; the size is read after to and used by view.
    assert [possible(names[name]) for name in ("b", "to", "size", "view")] == [True, False, True, True]
    x = torch.randn(2, 3)
    first, second = cut_graph(graph, [names["view"]])
    assert torch.equal(run(second, model, *run(first, model, x))[0], model(x))
    with pytest.raises(SplitError, match=r"'getattr_1' .* is a property of one rank, .* from stage 0 to 1; pass an"):
        cut_graph(graph, [names["to"]])


def test_memory_that_two_values_share_must_not_be_written_behind_a_cut():
    graph, _ = graph_of(lambda self, x: (self.a(x) + 1, self.b(x).relu_()), **linears("a", "b"))
    shared = [node for node in graph.nodes if node.name in ("a", "b")]
    for node in shared:
        node.meta["memory"] = 7
    add = next(index for index, node in enumerate(graph.nodes) if node.name == "relu_")
    assert len(cut_graph(graph, [add])) == 2
    list(graph.nodes)[add].meta["written"] = {7}
    with pytest.raises(SplitError, match="'a' and 'b' share memory that is written after the cut from stage 0 to 1"):
        graph.output(tuple(shared))
        cut_graph(graph, [add])


def test_a_buffer_is_used_on_one_side_of_a_cut_and_weights_and_constants_on_both():
    def forward(self, x):
        x = self.b(self.a(x + self.plain * self.weight) + self.shift)
        return self.c(x + self.shift) + self.plain * self.weight

    weight = nn.Parameter(torch.ones(3))
    model = model_of(forward, shift=torch.ones(3), weight=weight, **linears("a", "b", "c"))
    model.plain = torch.ones(3)
    graph = fx.symbolic_trace(model).graph
    possible = cut_test(graph, model)
    names = {node.name: index for index, node in enumerate(graph.nodes)}
    assert [possible(names[name]) for name in ("a", "add_1", "b", "add_2", "c")] == [True, True, False, False, True]

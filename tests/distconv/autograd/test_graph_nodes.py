"""Hooks on layers, nodes and leaves see the gradients of one process; what they return acts as there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import close

SHAPE = (4, 4, 7, 5)

RANKS = pytest.mark.ranks(2, 3)


def network():
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Conv2d(8, 4, 1), nn.Tanh())
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), inner, nn.Conv2d(4, 4, 1)).double()


def full(model, y, note):
    model[2].register_full_backward_hook(lambda layer, into, out: note(into, out) or (into[0] * 2,))


def full_and_pre(model, y, note):
    model[2].register_full_backward_hook(lambda layer, into, out: note(into, out))
    model[2].register_full_backward_pre_hook(lambda layer, out: (out[0].clamp(-0.01, 0.01),))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def old_style(model, y, note):
    model[2].register_backward_hook(lambda layer, into, out: note(out))


def node(model, y, note):
    y.grad_fn.register_hook(lambda into, out: note(out))
    y.grad_fn.register_prehook(lambda out: note(out) or (out[0] * 2,))


def several(model, y, note):
    register_multi_grad_hook((y, *model.parameters()), note)


def first_of_several(model, y, note):
    register_multi_grad_hook((y, model[3].weight), lambda grad: note((grad,)), mode="any")


def of_tensors(model, y, note):
    y.register_hook(lambda grad: note((grad,)) or dc.gather(grad) * 2)
    model[0].weight.register_hook(lambda grad: grad * 3)


def accumulators(model, y, note):
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for parameter, accumulator in zip(model.parameters(), nodes, strict=True):
        accumulator.register_prehook(lambda out: note(out) or (out[0] * 2,))
        accumulator.register_hook(lambda *_, parameter=parameter: note((parameter.grad,)))
    model.accumulators = nodes  # as in torch, the nodes live as long as somebody holds them


def gradients_seen_by_hooks(model, x, register):
    """Return the arguments of hooks, in any order, and all gradients."""
    noted = []

    def note(*groups):
        noted.extend(dc.gather(g).detach().clone() for group in groups for g in group if g is not None)

    y = model[:2](x)
    register(model, y, note)
    (model[2:](y) ** 2).sum().backward()
    shown = sorted(noted, key=lambda t: (t.shape, round(t.abs().sum().item(), 8)))
    return [*shown, *(dc.gather(p.grad) for p in model.parameters()), dc.gather(x.grad)]


HOOKS = [full, full_and_pre, old_style, node, several, first_of_several, of_tensors, accumulators]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("register", HOOKS)
@RANKS
def test_hooks_see_the_gradients_of_one_process_and_change_them_alike(comm, register):
    expected = gradients_seen_by_hooks(network(), normal(*SHAPE).requires_grad_(), register)
    for axis in "nhc":
        if axis == "c" and comm.size == 3:
            continue  # eight filters do not divide
        grid = grid_over(comm, **{axis: comm.size})
        found = gradients_seen_by_hooks(
            dc.parallelize(network(), grid), dc.scatter(normal(*SHAPE), grid).requires_grad_(), register
        )
        assert len(found) == len(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            close(one, other, f"gradient {number} over {axis}")


@RANKS
def test_a_layers_full_hook_sees_plain_and_distributed_inputs_each_as_it_is(comm):
    class Scaled(nn.Module):
        def forward(self, factor, x):
            return x * factor

    def run(x):
        layer, noted = Scaled(), []
        factor = normal(5).requires_grad_()
        layer.register_full_backward_hook(lambda _, into, out: noted.extend((*into, *out)))
        layer(factor, x).sin().sum().backward()
        return noted

    expected = run(normal(*SHAPE).requires_grad_())
    found = run(dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size)).requires_grad_())
    assert [isinstance(t, dc.DistTensor) for t in found] == [False, True, True]
    for one, other in zip(found, expected, strict=True):
        close(dc.gather(one), other, "what the hook saw")


@RANKS
def test_what_goes_into_a_node_of_the_distributed_graph_is_not_shown(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size)).requires_grad_()

    def look():
        y = x.sin()
        y.grad_fn.register_hook(lambda into, out: into[0])
        y.sum().backward()

    def change():
        y = x.sin()
        y.grad_fn.register_hook(lambda into, out: out)
        y.sum().backward()

    raises_everywhere(comm, dc.UnsupportedOperation, "register_full_backward_hook", look)
    raises_everywhere(comm, dc.UnsupportedOperation, "returns other gradients", change)
    behind = (x.sin() * 2).grad_fn.next_functions[0][0]
    raises_everywhere(comm, dc.UnsupportedOperation, "register_hook on the tensor", lambda: behind.register_hook(print))


def test_a_node_looks_like_torchs_own(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, n=comm.size)).requires_grad_()
    y = x.sin()
    assert y.grad_fn.name() == "SinBackward0" and "SinBackward0" in repr(y.grad_fn)
    assert y.grad_fn == y.grad_fn and len({y.grad_fn, y.grad_fn}) == 1
    assert y.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"


@RANKS
def test_a_node_that_is_called_says_what_to_do(comm):
    y = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size)).requires_grad_() * 2
    match = r"use torch\.autograd\.grad\(y, x, gradient\)"
    raises_everywhere(comm, dc.UnsupportedOperation, match, lambda: y.grad_fn(normal(*SHAPE)))

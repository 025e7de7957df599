"""Programs that torch transforms: compiled ones run as ever with distributed tensors, others say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv import transformations
from distconv.communication.transport import count_traffic
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere

SHAPE = (3, 2, 7, 4)


def digest_bytes(ranks: int) -> int:
    """Return the bytes of the weight digest that is summed with the gradients: 32 bits in pieces, and squares."""
    return 2 * {2: 3, 3: 3, 4: 3, 6: 4, 8: 4}[ranks] * 8


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, (7, 3))).double()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + 1


def scaled_after(net):
    return lambda x: scaled(net(x))


def in_place(net):
    net.compile(backend="eager")
    return scaled_after(net)


def as_function(net):
    return torch.compile(scaled_after(net), backend="aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("way", [in_place, as_function])
@pytest.mark.ranks(2)
def test_a_compiled_program_runs_eagerly_with_distributed_tensors(comm, way):
    def trained(net, call, *x):
        for _ in range(2):
            call(*x).square().sum().backward()
        state = dict(net.named_buffers()) | {name: p.grad for name, p in net.named_parameters()}
        return {name: dc.gather(t) for name, t in state.items()}

    net = network()
    expected = trained(net, scaled_after(net), normal(*SHAPE))
    for grid in grids(comm, "nch"):
        net = dc.parallelize(network(), grid)
        found = trained(net, way(net), dc.scatter(normal(*SHAPE), grid))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.long
@pytest.mark.ranks(2)
def test_calls_with_plain_tensors_are_still_compiled(comm):
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: scaled(x), backend=backend)
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=2))
    assert torch.equal(dc.gather(compiled(x)), scaled(normal(*SHAPE)))
    assert not graphs
    assert torch.equal(compiled(normal(*SHAPE)), scaled(normal(*SHAPE)))
    assert len(graphs) == 1


def on_meta(function):
    return lambda x: function(lambda t: (t**3).sum())(x)


def dual(x):
    with torch.autograd.forward_ad.dual_level():
        torch.autograd.forward_ad.make_dual(x, x)


def weights_transformed(x):
    weight = normal(4, 2, 3, 3)
    torch.func.grad(lambda w: F.conv2d(x, w).sum())(weight)


REFUSED = {
    "a compiled whole": (lambda x: torch.compile(scaled, backend="eager", fullgraph=True)(x), "Without fullgraph=True"),
    "a scripted function": (lambda x: torch.jit.script(scaled)(x), "^TorchScript works below"),
    "a scripted module": (lambda x: torch.jit.script(network())(x), "TorchScript works below"),
    "a trace": (lambda x: torch.jit.trace(scaled, x), "torch.jit.trace works below .*before it is parallelized"),
    "a traced module": (lambda x: torch.jit.trace(scaled, normal(*SHAPE))(x), "TorchScript works below"),
    "an export": (lambda x: torch.export.export(network(), (x,)), "torch.export.export works below"),
    "torch.func.grad": (on_meta(torch.func.grad), "torch.func .* Use torch.autograd.grad"),
    "torch.func.vmap": (on_meta(torch.func.vmap), "torch.func .* Use torch.autograd.grad"),
    "torch.func.jacrev": (on_meta(torch.func.jacrev), "torch.func .* Use torch.autograd.grad"),
    "torch.func.jvp": (lambda x: torch.func.jvp(torch.sin, (x,), (x,)), "torch.func .* Use torch.autograd.grad"),
    "a gradient of plain weights": (weights_transformed, "torch.func .* Use torch.autograd.grad"),
    "forward mode": (dual, "torch.autograd.functional.jvp"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.ranks(1, 2)
def test_programs_that_see_blocks_are_refused_on_all_ranks(comm, name):
    call, match = REFUSED[name]
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, match, lambda: call(x))


@pytest.mark.ranks(2)
def test_modules_with_sharded_weights_are_found(comm):
    net = dc.parallelize(network(), grid_over(comm, c=2))
    assert transformations.contains_dist_tensor({"a": (net,)})
    assert not transformations.contains_dist_tensor([network(), normal(2)])
    raises_everywhere(
        comm, dc.UnsupportedOperation, "torch.export.export", lambda: torch.export.export(net, (normal(*SHAPE),))
    )


@pytest.mark.ranks(2)
def test_derivatives_of_functions_are_those_of_one_process(comm):
    def of(x):
        jvp = torch.autograd.functional.jvp(lambda t: t.sin() * t, x, x)[1]
        return jvp, torch.autograd.functional.jacobian(lambda t: t[:1, :, :1, :1] ** 2, x)

    expected = of(normal(*SHAPE))
    for grid in grids(comm, "nch"):
        found = [dc.gather(t) for t in of(dc.scatter(normal(*SHAPE), grid))]
        torch.testing.assert_close(found, [*expected], rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(2, 3)
def test_gradients_are_still_summed_behind_the_backward_pass_once_a_compilation_has_failed(comm):
    x = dc.scatter(normal(9, 3), grid_over(comm, n=comm.size))
    # The compiler then stays between Python and its functions.
    with pytest.raises(dc.UnsupportedOperation):
        torch.compile(scaled, backend="eager", fullgraph=True)(x)
    model = dc.parallelize(nn.Linear(3, 2).double(), x.grid, broadcast=True)
    with count_traffic() as traffic:
        model(x).sum().backward()
    assert traffic.reduced["gradient sum of 2 parameters", comm.size] == (3 * 2 + 2) * 8 + digest_bytes(comm.size)

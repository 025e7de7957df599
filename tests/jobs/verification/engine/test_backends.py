"""One case in one world: values and gradients by name, where its tensors lie, and errors on some ranks alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import distconv as dc
from distconv.jobs.verification.conformance.samples import Sample
from distconv.jobs.verification.engine.backends import DistributedBackend, OthersRaise, ReferenceBackend
from distconv.jobs.verification.engine.layouts import CaseLayout
from tests.distconv.layouts import grid_over, normal


def test_values_and_gradients_are_found_and_the_sample_stays_as_it_was():
    x, y = normal(3, 4).requires_grad_(), normal(4)
    backend = ReferenceBackend(CaseLayout("none"))
    Sample("none", "0", lambda x, y: (x * y, 3), (x, y), {}).compute(backend)
    assert set(backend.results) == {"y0", "y1", "dL/dx0"}
    assert torch.equal(backend.results["y0"], x * y) and backend.results["y1"] == 3 and x.grad is None


def test_gradients_are_those_of_random_activation_gradients():
    backend = ReferenceBackend(CaseLayout("none"))
    module, x, number = nn.BatchNorm1d(3).double(), backend.put(normal(4, 3)), backend.plain(torch.tensor(2))
    assert x.requires_grad and not number.requires_grad and not backend.put(normal(2), grad=False).requires_grad
    assert backend.model(module) is module
    y = module(x)
    outputs = [y, torch.view_as_complex(y.reshape(6, 2)) ** 2, number * 2, (x.sum() * 3j)]
    random = torch.Generator().manual_seed(6)

    def normal_like(y):
        g = torch.randn(y.shape, generator=random, dtype=torch.float64)
        return torch.complex(g, g.flip(0) if g.dim() else g) if y.is_complex() else g

    wanted = {"x": x, **dict(module.named_parameters())}
    directions = [normal_like(each) for each in (outputs[0], outputs[1], outputs[3])]
    differentiable = [outputs[0], outputs[1], outputs[3]]
    expected = torch.autograd.grad(differentiable, list(wanted.values()), directions, retain_graph=True)
    backend.differentiate(outputs, {"x": x, "none": None, "number": number}, module)
    results = backend.results
    assert list(results) == [
        *("y0", "y1", "y2", "y3", "dL/dx", "dL/dweight", "dL/dbias"),
        *("running_mean", "running_var", "num_batches_tracked"),
    ]
    for name, gradient in zip(wanted, expected, strict=True):
        torch.testing.assert_close(results[f"dL/d{name}"], gradient)
    assert all(torch.equal(results[f"y{number}"], y) for number, y in enumerate(outputs))
    assert not results["y0"].requires_grad and results["running_mean"] is not module.running_mean
    other = ReferenceBackend(CaseLayout("none"))
    other.state(module)
    other.record("sparse", torch.eye(2).to_sparse())
    assert list(other.results) == ["weight", "bias", *list(results)[-3:], "sparse"]
    assert torch.equal(other.results["sparse"], torch.eye(2)) and torch.equal(other.results["weight"], module.weight)


def test_only_the_first_tensor_is_distributed_if_the_layout_says_so(comm):
    seen = []

    def look(k, x, y):
        seen.extend([x, *y])
        return x * 1

    sample, grid = Sample("none", "0", look, (2, normal(3, 4, 5), [normal(4, 5)]), {}), grid_over(comm, w=comm.size)
    extents = (("w", comm.size),)
    sample.compute(DistributedBackend(grid, CaseLayout("", extents, first_only=True), bool))
    assert isinstance(seen[0], dc.DistTensor) and seen[0].dist.axes == ("n", None, "w")
    assert not isinstance(seen[1], dc.DistTensor)
    seen.clear()
    sample.compute(DistributedBackend(grid, CaseLayout("", extents), bool))
    assert [x.dist.axes for x in seen] == [("n", None, "w"), ("n", "w")]


@pytest.mark.ranks(2)
def test_nobody_differentiates_what_failed_elsewhere(comm):
    backend = DistributedBackend(
        grid_over(comm, h=2), CaseLayout("", (("h", 2),)), lambda failed: comm.allreduce(failed) > 0
    )
    if comm.rank == 0:
        with pytest.raises(OthersRaise):
            backend.differentiate(backend.put(normal(4, 1, 3, 3)) * 2, {})
        assert not backend.results
    else:
        backend.put(normal(4, 1, 3, 3))
        backend.together(failed=True)

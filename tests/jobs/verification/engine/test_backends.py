"""One case in one world: values and gradients by name, where its tensors lie, and errors on some ranks alone."""

from __future__ import annotations

import pytest
import torch

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

"""One sample in one world: values and gradients by name, and where its tensors lie."""

from __future__ import annotations

import torch

import distconv as dc
from distconv.jobs.verification.torch_samples.attempt import Split, attempt
from distconv.jobs.verification.torch_samples.database import Sample
from tests.distconv.layouts import grid_over, normal


def test_values_and_gradients_are_found_and_the_sample_stays_as_it_was():
    x, y = normal(3, 4).requires_grad_(), normal(4)
    found = attempt(Sample("none", "0", lambda x, y: (x * y, 3), (x, y), {}), lambda failed: failed, None, None)
    assert set(found.values) == {"y0", "y1", "dL/dx0"} and found.refused is None and not found.warned
    assert torch.equal(found.values["y0"], x * y) and found.values["y1"] == 3 and x.grad is None


def test_a_refusal_is_kept():
    sample = Sample("none", "0", torch.linalg.inv, (normal(3, 4),), {})
    found = attempt(sample, lambda failed: failed, None, None)
    assert found.refused is not None and "square" in found.refused.text and not found.values


def test_only_the_first_tensor_is_distributed_if_the_split_says_so(comm):
    seen = []

    def look(*given):
        seen.extend(given)
        return given[0] * 1

    sample = Sample("none", "0", look, (2, normal(3, 4, 5), [normal(4, 5)]), {})
    grid = grid_over(comm, w=comm.size)
    attempt(Sample("none", "0", lambda k, x, y: look(x, *y), sample.args, {}), bool, Split("", None, "w", False), grid)
    assert isinstance(seen[0], dc.DistTensor) and seen[0].dist.axes == (None, None, "w")
    assert not isinstance(seen[1], dc.DistTensor)
    seen.clear()
    attempt(Sample("none", "0", lambda k, x, y: look(x, *y), sample.args, {}), bool, Split("", "n", "w", True), grid)
    assert [x.dist.axes for x in seen] == [("n", None, "w"), ("n", "w")]

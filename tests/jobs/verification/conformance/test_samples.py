"""The samples: as many as torch has, in all variants, and the same each time."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from distconv.jobs.verification.conformance import samples


def test_torchs_operators_and_modules_have_samples():
    names = samples.names()
    assert len(names) > 700 and {"add", "linalg.inv", "nn.functional.conv2d", "nn.Conv2d"} <= set(names)
    assert "empty_like" not in names


@pytest.mark.parametrize("name", ["add", "nn.functional.batch_norm", "nn.Linear"])
def test_samples_are_the_same_each_time(name):
    one, other = ([s for s in samples.samples(name, 3)] for _ in range(2))
    assert [s.option for s in one] == [s.option for s in other]
    for a, b in zip(one, other, strict=True):
        for x, y in zip(tree_leaves((a.args, a.kwargs)), tree_leaves((b.args, b.kwargs)), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_variants_give_what_the_function_does():
    first = {sample.option: sample for sample in samples.samples("exp", 1)}
    assert set(first) == {"0", "0 in place", "0 out="}
    values = [sample.function(*sample.args, **sample.kwargs) for sample in first.values()]
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def test_a_module_is_built_alike_and_in_float64():
    sample = next(samples.samples("nn.Linear", 1))
    one, other = sample.module(), sample.module()
    assert torch.equal(one.weight, other.weight) and one.weight.dtype is torch.float64 and len(sample.tensors()) == 1


def test_the_largest_sample_is_called_by_every_name():
    found = {sample.option: sample for sample in samples.largest("abs")}
    (plain, changed) = found.values()
    assert "in place" in changed.option and plain.size() == changed.size() == 20 * 20
    values = plain.function(*plain.args)
    # abs and absolute, as functions and methods; operator.abs is no spelling of torch's database.
    assert len(values) >= 4 and all(torch.equal(value, plain.args[0].abs()) for value in values)
    assert len(changed.function(*changed.args)) == 2
    (module, evaluated) = samples.largest("nn.BatchNorm2d")
    assert module.module().training and not evaluated.module().training


def test_a_sample_loses_the_elements_of_one_dimension_after_the_other():
    shapes = {s.option: [tuple(t.shape) for t in s.tensors()] for s in samples.emptied("mm")}
    assert shapes == {
        "dimension 0": [(0, 10), (10, 5)],
        "dimension 0 of all": [(0, 10), (10, 0)],
        "dimension 1": [(5, 0), (10, 5)],
        "dimension 1 of all": [(5, 0), (0, 5)],
    }
    assert not list(samples.emptied("lu_unpack"))  # torch crashes


def test_tensors_are_split_by_kind_or_at_their_ends():
    sample = next(samples.largest("nn.functional.conv2d"))
    assert sample.axes >= set("nchw") and {layout.kind for layout in sample.layouts(4)} == set(samples.KINDS)
    sample = next(samples.samples("nn.functional.conv2d", 1))
    assert [layout.kind for layout in sample.layouts(2)] == [
        *("first", "first, first tensor only", "last", "last, first tensor only"),
    ]
    assert sample.layouts(4)[-1].kind == "both, first tensor only"


def test_only_strided_tensors_with_a_dimension_can_be_split():
    assert samples.can_be_split(torch.zeros(1))
    for other in (torch.tensor(1.0), torch.eye(2).to_sparse(), 3, None):
        assert not samples.can_be_split(other)

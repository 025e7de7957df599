"""The samples: as many as torch has, in all variants, and the same each time."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from distconv.jobs.verification.torch_samples import database


def test_torchs_operators_and_modules_have_samples():
    names = database.names()
    assert len(names) > 700 and {"add", "linalg.inv", "nn.functional.conv2d", "nn.Conv2d"} <= set(names)
    assert "empty_like" not in names


@pytest.mark.parametrize("name", ["add", "nn.functional.batch_norm", "nn.Linear"])
def test_samples_are_the_same_each_time(name):
    one, other = ([s for s in database.samples(name, 3)] for _ in range(2))
    assert [s.name for s in one] == [s.name for s in other]
    for a, b in zip(one, other, strict=True):
        for x, y in zip(tree_leaves((a.args, a.kwargs)), tree_leaves((b.args, b.kwargs)), strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_variants_give_what_the_function_does():
    first = {sample.option: sample for sample in database.samples("add", 1)}
    assert set(first) == {"0", "0 in place", "0 out="}
    values = [sample.function(*sample.args, **sample.kwargs) for sample in first.values()]
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


def test_a_module_is_built_alike_and_in_float64():
    sample = next(database.samples("nn.Linear", 1))
    one, other = sample.module(), sample.module()
    assert torch.equal(one.weight, other.weight) and one.weight.dtype is torch.float64 and sample.tensors() == 1

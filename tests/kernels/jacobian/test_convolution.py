"""Jacobians of convolutions against autograd."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from distconv.errors import ShapeError
from distconv.kernels.jacobian import Windows, batched_conv2d, conv2d
from tests.kernels.jacobian.references import assert_close, jacobian_by_autograd, normal


def random_case(seed):
    """A weight, an input shape, and stride, padding, dilation and groups."""
    rng = random.Random(seed)
    groups, kernel = rng.choice([1, 2, 3]), (rng.randint(1, 4), rng.randint(1, 3))
    channels, filters = groups * rng.randint(1, 2), groups * rng.randint(1, 2)
    shape = (channels, rng.randint(7, 9), rng.randint(5, 9))
    weight = normal(filters, channels // groups, *kernel, seed=seed)
    options = [(rng.randint(1, 3), rng.randint(1, 2)), (rng.randint(0, 2), rng.randint(0, 2))]
    return weight, shape, (*options, (rng.randint(1, 2), rng.randint(1, 2)), groups)


@pytest.mark.parametrize("seed", range(12))
def test_a_convolutions_jacobian_is_autograds(seed):
    weight, shape, options = random_case(seed)
    found = conv2d(weight, shape, *options)
    assert found.layout == torch.sparse_csr
    assert_close(found.to_dense(), jacobian_by_autograd(lambda x: F.conv2d(x, weight, None, *options), normal(*shape)))
    parts = found.crow_indices(), found.col_indices(), found.values()
    torch.sparse_csr_tensor(*parts, tuple(found.shape), check_invariants=True)


@pytest.mark.parametrize("seed", range(5))
def test_pruned_weights_are_no_places_of_the_pattern(seed):
    weight, shape, (stride, padding, dilation, groups) = random_case(seed)
    weight[normal(*weight.shape, seed=9) < 0.4] = 0
    windows = Windows.build(shape[1:], tuple(weight.shape[2:]), stride, padding, dilation)
    found = batched_conv2d(weight, shape[0], windows, groups, pruned=True)
    assert (found.values != 0).all()
    assert_close(found.to_dense()[0], conv2d(weight, shape, stride, padding, dilation, groups).to_dense())


def test_the_pattern_is_made_once_and_new_weights_change_the_values_alone():
    windows = Windows.build((6, 6), 3, 1, 1, 1)
    first, second = (batched_conv2d(normal(4, 3, 3, 3, seed=seed), 3, windows) for seed in (1, 2))
    assert first.pattern is second.pattern and not torch.equal(first.values, second.values)


def test_the_first_layer_of_vgg11_has_the_papers_number_of_zeros():
    found = conv2d(torch.ones(64, 3, 3, 3), (3, 32, 32), padding=1)
    assert tuple(found.shape) == (3072, 65536) and found.values().numel() == 1_696_512
    assert f"{1 - 1_696_512 / (3072 * 65536):.5f}" == "0.99157"


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"weight \(4, 3, 3, 3\) in 1 groups does not fit an input of 2 channels"):
        conv2d(normal(4, 3, 3, 3), (2, 8, 8))
    with pytest.raises(ShapeError, match=r"no window of \(3, 3\).* fits an input of \(2, 2\)"):
        conv2d(normal(4, 3, 3, 3), (3, 2, 2))

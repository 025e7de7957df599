"""Windows against torch's own outputs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from distconv.errors import ShapeError
from distconv.kernels.jacobian import Windows


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("kernel", [1, 2, 3])
def test_there_are_as_many_outputs_as_torch_gives(kernel, ceil):
    for extent, stride, padding, dilation in itertools.product(range(3, 9), (1, 2, 3), (0, 1), (1, 2)):
        if 2 * padding <= kernel and dilation * (kernel - 1) < extent + 2 * padding:
            options = (kernel, stride, padding, dilation)
            expected = F.max_pool2d(torch.zeros(1, extent, 8), *options, ceil).shape[1:]
            assert Windows.build((extent, 8), *options, ceil=ceil).out == tuple(expected)


def test_pairs_are_every_element_of_a_window_that_lies_inside():
    windows = Windows.build((4, 5), (2, 3), (2, 1), (1, 0), (1, 2))
    found = set(zip(*(index.tolist() for index in windows.pairs()), strict=True))
    expected = set()
    for oy, ox, ky, kx in itertools.product(range(windows.out[0]), range(windows.out[1]), range(2), range(3)):
        y, x = 2 * oy - 1 + ky, ox + 2 * kx
        if 0 <= y < 4 and 0 <= x < 5:
            expected.add((3 * ky + kx, 5 * y + x, windows.out[1] * oy + ox))
    assert found == expected


@pytest.mark.parametrize("wrong", [(3, 1, 0, 2), (2, 0, 0, 1), (2, 1, -1, 1), (9, 1, 0, 1)])
def test_windows_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ShapeError, match="no window of"):
        Windows.build(4, *wrong)

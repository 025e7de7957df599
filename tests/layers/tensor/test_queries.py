"""Queries whose results are not tensors: every rank gets the result of a single process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.uneven_layouts import uneven_layouts

SHAPE = (3, 4, 7, 5)

QUERIES = {
    "equal": lambda x, p: (torch.equal(x, p), torch.equal(p, x + 1), x.equal(p[:, :1])),
    "allclose": lambda x, p: (torch.allclose(x, p + 1e-9), torch.allclose(p, x + 1), x.allclose(x)),
    "stride": lambda x, p: (x.stride(), x.stride(1), x.storage_offset()),
    "type": lambda x, p: (x.type(), x.float().type(), x.type(torch.float32).dtype),
    "is_tensor": lambda x, p: (torch.is_tensor(x), torch.numel(x), isinstance(x, torch.Tensor)),
    "result_type": lambda x, p: (torch.result_type(x, 1), torch.result_type(x.float(), p.sum())),
    "truth": lambda x, p: (bool(x.max() > 1), torch.is_nonzero(x.sum() * 0), bool(x.isnan().any())),
    "membership": lambda x, p: (p.max() in x, 7.0 in x),
    "shape": lambda x, p: (*x.shape, x.size(-1), len(x), [row.shape for row in x], x.is_same_size(p)),
    "memory formats": lambda x, p: (
        x.contiguous(memory_format=torch.channels_last).shape,
        x.to(memory_format=torch.channels_last).sum().item().__class__,
    ),
    "an index": lambda x, p: [10, 20, 30, 40][x.argmax() % 4],
    "closeness": lambda x, p: bool(torch.isclose(x, p).all()),
}


@pytest.mark.parametrize("name", QUERIES)
def test_answers_are_those_of_one_process(comm, name):
    x = normal(*SHAPE)
    expected = QUERIES[name](x, x)
    for dist in uneven_layouts(comm, SHAPE):
        assert QUERIES[name](dc.scatter(x, dist), x) == expected


def test_a_version_grows_with_changes_in_place(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    before = x._version
    assert not x.is_conj()
    x.add_(1)
    assert x._version > before


def test_a_fraction_is_no_index(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    raises_everywhere(comm, TypeError, "only integer tensors of a single element", lambda: [1, 2][x.sum()])


@pytest.mark.ranks(2, 3)
def test_contiguity_is_that_of_one_process(comm):
    p = normal(*SHAPE)
    for grid in (grid_over(comm, **{axis: comm.size}) for axis in "nch"):
        x = dc.scatter(p, grid)
        for change in (
            lambda t: t,
            lambda t: t.permute(0, 2, 3, 1),
            lambda t: t[:, :, 1:],
            lambda t: t.contiguous(memory_format=torch.channels_last),
        ):
            found, expected = change(x), change(p)
            for layout in (torch.contiguous_format, torch.channels_last):
                assert found.is_contiguous(memory_format=layout) == expected.is_contiguous(memory_format=layout)
            assert found.is_contiguous() == expected.is_contiguous()


@pytest.mark.ranks(2)
def test_views_that_one_process_refuses_raise(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=2)).permute(0, 2, 3, 1)
    raises_everywhere(comm, dc.ShapeError, "view size is not compatible.*Use .reshape", lambda: x.view(3, -1))
    assert x.reshape(3, -1).shape == (3, 140)


@pytest.mark.ranks(2)
def test_many_elements_are_no_number_and_nothing_is_sent_for_them(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=2))
    for convert in (int, float, complex):
        raises_everywhere(comm, ValueError, "only one element tensors can be converted", lambda c=convert: c(x))
    raises_everywhere(comm, RuntimeError, "Boolean value of Tensor with more than one value", lambda: bool(x))


@pytest.mark.ranks(2)
def test_whether_a_gradient_is_kept_is_said(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=2)).requires_grad_()
    y = x * 2
    assert not y.retains_grad
    y.retain_grad()
    assert y.retains_grad
    assert not y.is_pinned()

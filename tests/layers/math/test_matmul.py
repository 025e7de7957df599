"""Matrix products, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

ONE = {
    "matrices": lambda x: x @ x.mT,
    "addmm of nothing": lambda x: (
        torch.addmm(x[0, :, 0] * torch.nan, x[0, :, :, 0], x[0, 0], beta=0).detach() * x[0, 0, 0]
    ),
    "baddbmm": lambda x: torch.baddbmm(x[0].sum(), x[0], x[1].mT),
    "by torch's names": lambda x: (
        torch.addmm(x[0, :, 0], mat1=x[0, :, :, 0], mat2=x[0, 0]) + x[0, :, :, 1].mm(mat2=x[0, 0])
    ),
    "einsum over space": lambda x: torch.einsum("nchw,ndhw->ncd", x, x),
    "einsum by numbers": lambda x: torch.einsum(x, [0, 1, 2, 3], x, [0, 4, 2, 3], [1, 4]),
}

WITH_PLAIN = {
    "product of a plain matrix": lambda x, w: w.view(2, 5, 7)[0] @ x,
    "outer": lambda x, w: torch.outer(w[0, 0], x[0, 0, :, 0]),
    "addmm": lambda x, w: torch.addmm(w[0, 0], x[0, 0], w[0]),
}


@pytest.mark.parametrize("name", ONE)
@UP_TO_FOUR_RANKS
def test_products_equal_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, ONE[name], normal(*SHAPE))


@pytest.mark.parametrize("name", WITH_PLAIN)
@UP_TO_FOUR_RANKS
def test_a_plain_factor_gets_its_full_gradient(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, WITH_PLAIN[name], normal(*SHAPE), plain=(normal(2, 5, 7, seed=1),))


PLUS = {
    "addmm": (torch.addmm, (4, 6), (4, 5), (5, 6)),
    "addmv": (torch.addmv, (4,), (4, 5), (5,)),
    "addr": (torch.addr, (4, 6), (4,), (6,)),
    "baddbmm": (torch.baddbmm, (2, 4, 6), (2, 4, 5), (2, 5, 6)),
    "addbmm": (torch.addbmm, (4, 6), (2, 4, 5), (2, 5, 6)),
}


@pytest.mark.parametrize("name", PLUS)
@pytest.mark.parametrize("beta", [1, 0, 0.5])
@UP_TO_FOUR_RANKS
def test_any_one_of_the_operands_of_a_sum_with_a_product_may_be_distributed(comm, name, beta):
    function, *shapes = PLUS[name]
    operands = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    for place, one in enumerate(operands):
        others = [t for t in operands if t is not one]

        def call(split, *plain, place=place):
            given = [*plain[:place], split, *plain[place:]]
            return function(*given, beta=beta, alpha=2)

        for axes in (("n", None), (None, "c")):
            dims = (None, *axes)[3 - one.dim() :] if one.dim() > 1 else ("n",)
            grid = grid_over(comm, **{next(a for a in dims if a): comm.size})
            same_as_one_process(grid, call, one, plain=others, dims=[dims])


@pytest.mark.ranks(at_least=2)
def test_rows_and_batches_keep_their_splits(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    assert (x @ normal(5, 6)).dist.axes == ("n", "c", "h", None)
    assert torch.einsum("nchw,ndhw->ncd", x, x).dist.split_axes == ()


GROWING = {
    "rows": (lambda x, w: w @ x, (13, 8)),
    "rows for each channel": (lambda x, w: w @ x, (2, 14, 8)),
    "two sums": (lambda x, w: torch.einsum("nchw,kldh->nklw", x, w.unsqueeze(2)), (5, 4, 8)),
    "fewer rows than ranks": (lambda x, w: torch.einsum("nchw,kjhd->ndkjw", x, w), (1, 1, 8, 30)),
    "on a diagonal": (lambda x, w: torch.einsum("nchw,kkh->nkcw", x, w), (30, 30, 8)),
}


@pytest.mark.parametrize("name", GROWING)
@UP_TO_FOUR_RANKS
def test_a_product_larger_than_what_it_sums_is_split_along_another_dimension(comm, name):
    call, shape = GROWING[name]
    weight = normal(*shape, seed=1)
    uneven = dc.Distribution(
        grid_over(comm, h=comm.size), (None, None, "h", None), boundaries={"h": (0, *range(5, 4 + comm.size), 8)}
    )
    for target in (*grids(comm, "nch"), uneven):
        same_as_one_process(target, call, normal(3, 2, 8, 5), plain=[weight])


@pytest.mark.ranks(2, 3)
def test_a_matrix_of_pixels_by_pixels_keeps_the_blocks_of_pixels(comm):
    edges = (0, *range(5, 4 + comm.size), 8)
    grid = grid_over(comm, h=comm.size)
    x = dc.scatter(normal(2, 8, 1), dc.Distribution(grid, (None, "h", None), boundaries={"h": edges}))
    y = torch.einsum("nmc,kmq->nqkc", x, normal(3, 8, 8))
    assert y.dist == dc.Distribution(grid, (None, "h", None, None), boundaries={"h": edges})


def test_matrices_that_do_not_fit_raise_torchs_error(comm):
    x = dc.scatter(normal(3, 6), grid_over(comm, n=comm.size))
    match = r"mat1 and mat2 shapes cannot be multiplied \(3x6 and 5x4\)"
    raises_everywhere(comm, dc.ShapeError, match, lambda: x @ normal(5, 4))
    raises_everywhere(comm, dc.ShapeError, "same dtype", lambda: x @ normal(6, 4).float())


def test_with_beta_zero_nothing_is_left_of_what_is_added_to(comm):
    unknown = torch.full((6, 5), torch.nan, dtype=torch.float64)
    for grid in grids(comm, "nc"):
        same_as_one_process(grid, partial(torch.addmm, beta=0, alpha=2), unknown, normal(6, 4), normal(4, 5, seed=1))


def test_labels_of_an_einsum_without_an_arrow_come_in_their_alphabets_order(comm):
    for grid in grids(comm, "nc"):
        for equation in ("ba", "ib,ia", "ba,ci"):
            operands = [normal(6, 5, seed=i) for i in range(1 + equation.count(","))]
            same_as_one_process(grid, partial(torch.einsum, equation), *operands)

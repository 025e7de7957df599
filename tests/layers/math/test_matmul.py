"""Matrix products, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import same_as_one_process
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

ONE = {
    "matrices": lambda x: x @ x.mT,
    "matrices whose rows are summed": lambda x: torch.matmul(x.mT, x),
    "bmm": lambda x: torch.bmm(x[0], x[1].mT),
    "matrix and vector": lambda x: x[0, 0] @ x[0, 0, 1] + torch.mv(x[0, 0], x[1, 0, 1]),
    "vectors": lambda x: x[0, 0, :, 1].dot(x[0, 0, :, 2]) + torch.dot(x[0, :, 1, 1], x[0, :, 2, 2]),
    "outer": lambda x: torch.outer(x[0, 0, :, 1], x[1, 0, 1]),
    "addmm": lambda x: torch.addmm(x[0, :, 0], x[0, :, :, 0], x[0, 0], beta=0.5, alpha=2),
    "addmm of nothing": lambda x: (
        torch.addmm(x[0, :, 0] * torch.nan, x[0, :, :, 0], x[0, 0], beta=0).detach() * x[0, 0, 0]
    ),
    "baddbmm": lambda x: torch.baddbmm(x[0].sum(), x[0], x[1].mT),
    "addmv": lambda x: torch.addmv(x[0, 0, :, 0], x[0, 0], x[0, 0, 1]),
    "by torch's names": lambda x: (
        torch.addmm(x[0, :, 0], mat1=x[0, :, :, 0], mat2=x[0, 0]) + x[0, :, :, 1].mm(mat2=x[0, 0])
    ),
    "addbmm": lambda x: torch.addbmm(x[0, 0].mT @ x[0, 0], batch1=x[0].mT, batch2=x[1], beta=2),
    "einsum over space": lambda x: torch.einsum("nchw,ndhw->ncd", x, x),
    "einsum to a number": lambda x: torch.einsum("nchw,nchw", x, x),
    "einsum with dots": lambda x: torch.einsum("b...,b...->...", x, x),
    "einsum of one": lambda x: torch.einsum("nchw->wc", x),
    "einsum by numbers": lambda x: torch.einsum(x, [0, 1, 2, 3], x, [0, 4, 2, 3], [1, 4]),
    "einsum of a diagonal": lambda x: torch.einsum("nchh->nch", x[:, :, :5]),
    "tensordot": lambda x: torch.tensordot(x, x, ([1, 2], [1, 2])),
    "vecdot": lambda x: torch.linalg.vecdot(x, x * x, dim=1),
}

WITH_PLAIN = {
    "product with a plain matrix": lambda x, w: x @ w[0],
    "product of a plain matrix": lambda x, w: w.view(2, 5, 7)[0] @ x,
    "product with plain matrices of a batch": lambda x, w: w[:1, :, :5] @ x.mT,
    "einsum": lambda x, w: torch.einsum("...hw,owh->...o", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w.reshape(5, 2, 7), 1),
    "bilinear": lambda x, w: F.bilinear(x, x, w.reshape(-1)[:50].reshape(2, 5, 5), w[0, 0, :2]),
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


def test_factors_may_have_blocks_without_elements(comm):
    grid = grid_over(comm, c=comm.size)
    weight = normal(2, 1, 1, seed=2)
    same_as_one_process(grid, lambda x, y: F.bilinear(x, y, weight), normal(5, 1), normal(5, 1, seed=1))
    same_as_one_process(
        grid, lambda x, y: x @ y.T + torch.einsum("ni,mi->nm", x, y), normal(5, 1), normal(4, 1, seed=1)
    )


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


def test_matrices_that_do_not_fit_raise_torchs_error(comm):
    x = dc.scatter(normal(3, 6), grid_over(comm, n=comm.size))
    match = r"mat1 and mat2 shapes cannot be multiplied \(3x6 and 5x4\)"
    raises_everywhere(comm, dc.ShapeError, match, lambda: x @ normal(5, 4))
    raises_everywhere(comm, dc.ShapeError, "same dtype", lambda: x @ normal(6, 4).float())


@pytest.mark.cpu
def test_every_rank_computes_in_autocasts_dtype(comm):
    x = normal(*SHAPE).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dist in uneven_layouts(comm, SHAPE):
            y = dc.scatter(x, dist)
            for name in ("matrices", "baddbmm", "einsum over space"):
                found, expected = dc.gather(ONE[name](y)), ONE[name](x)
                assert found.dtype == expected.dtype == torch.bfloat16
                assert torch.allclose(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


def test_with_beta_zero_nothing_is_left_of_what_is_added_to(comm):
    unknown = torch.full((6, 5), torch.nan, dtype=torch.float64)
    for grid in grids(comm, "nc"):
        same_as_one_process(grid, partial(torch.addmm, beta=0, alpha=2), unknown, normal(6, 4), normal(4, 5, seed=1))


def test_labels_of_an_einsum_without_an_arrow_come_in_their_alphabets_order(comm):
    for grid in grids(comm, "nc"):
        for equation in ("ba", "ib,ia", "ba,ci"):
            operands = [normal(6, 5, seed=i) for i in range(1 + equation.count(","))]
            same_as_one_process(grid, partial(torch.einsum, equation), *operands)

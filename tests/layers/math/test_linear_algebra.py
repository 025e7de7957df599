"""Matrices and signals in batches that are split, against one process."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from tests.distconv.layouts import grid_over, normal, raises_everywhere
from tests.layers.compare import close, same_as_one_process, whole

L = torch.linalg


def symmetric(x):
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


MATRIX_FUNCTIONS = {
    "eigh": lambda x: L.eigh(x + x.mT)[0] + L.eigh(x + x.mT)[1].square().sum(-1),
    "eigvals": lambda x: L.eigvals(x).abs().sum(-1, keepdim=True) + x.sum(-1),
    "svd": lambda x: L.svd(x)[1] + L.svd(x)[0].abs().sum(-1),
    "qr": lambda x: L.qr(x)[1].abs(),
    "inv": lambda x: L.inv(x),
    "cholesky": lambda x: L.cholesky(symmetric(x)),
    "det": lambda x: L.det(x),
    "slogdet": lambda x: L.slogdet(x)[1],
    "logdet": lambda x: symmetric(x).logdet(),
    "solve by name": lambda x: L.solve(A=symmetric(x), B=x, left=False),
    "solve for vectors": lambda x: L.solve(symmetric(x), x[..., 0]),
    "solve of one matrix": lambda x: L.solve(symmetric(normal(4, 4, seed=3)), x),
    "triangular": lambda x: L.solve_triangular(symmetric(x), x, upper=True),
    "matrix exponentials": lambda x: L.matrix_exp(x),
    "pseudoinverse": lambda x: L.pinv(x),
    "ranks": lambda x: L.matrix_rank(x).double() * x.mean(),
    "a nuclear norm": lambda x: L.matrix_norm(x, "nuc"),
    "a spectral norm that keeps dimensions": lambda x: L.matrix_norm(x, 2, keepdim=True),
    "a norm of other dimensions": lambda x: L.matrix_norm(x.mT.unsqueeze(1), 1, dim=(3, 2)),
    "an old nuclear norm": lambda x: torch.norm(x, "nuc", dim=(1, 2)),
    "a cross product along another dimension": lambda x: torch.cross(x[:, :3], x[:, 1:], dim=1),
    "a diagonal above": lambda x: L.diagonal(x, offset=1),
    "a quantile": lambda x: x.quantile(0.3, dim=1),
    "quantiles": lambda x: torch.quantile(x, torch.tensor([0.3, 0.8], dtype=x.dtype), dim=2, keepdim=True),
    "quantiles without NaN": lambda x: torch.nanquantile(x, 0.3, dim=-1, interpolation="nearest"),
}


def layouts(comm):
    samples, columns = grid_over(comm, n=comm.size), grid_over(comm, w=comm.size)
    uneven = (0, 0, *(7,) * (comm.size - 1)) if comm.size > 1 else (0, 7)
    return [
        dc.Distribution(samples, ("n", None, None)),
        dc.Distribution(samples, ("n", None, None), boundaries={"n": uneven}),
        dc.Distribution(samples, ("n", None, None), cyclic={"n": 1}),
        dc.Distribution(columns, (None, None, "w")),
    ]


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.parametrize("name", MATRIX_FUNCTIONS)
@pytest.mark.ranks(1, 2, 3)
def test_matrices_in_a_batch_equal_one_process(comm, name):
    for dist in layouts(comm):
        found = same_as_one_process(dist, MATRIX_FUNCTIONS[name], normal(7, 4, 4))
        assert found.dist.split_axes or not dist.split[0], dist


@pytest.mark.filterwarnings("error::distconv.ReplicationWarning")
@pytest.mark.ranks(1, 2, 3)
def test_signals_equal_one_process(comm):
    window = torch.hann_window(8, dtype=torch.float64)

    def there_and_back(x):
        spectrum = torch.stft(x, 8, 3, window=window, return_complex=True)
        return (
            torch.istft(spectrum, 8, 3, window=window) + x.stft(8, 3, window=window, return_complex=True).abs().mean()
        )

    grid = grid_over(comm, n=comm.size)
    same_as_one_process(dc.Distribution(grid, ("n", None)), there_and_back, normal(5, 30))
    same_as_one_process(dc.Distribution(grid, (None, "n")), there_and_back, normal(5, 30))


@pytest.mark.ranks(2, 3)
def test_results_keep_the_batch_where_it_is_and_nothing_is_sent(comm):
    dist = dc.Distribution(grid_over(comm, n=comm.size), ("n", None, None))
    x = dc.scatter(normal(7, 4, 4), dist)
    values, vectors = L.eigh(x + x.mT)
    assert values.dist.axes == ("n", None) and vectors.dist == dist
    signs, logarithms = L.slogdet(x)
    assert signs.dist.axes == logarithms.dist.axes == ("n",)


@pytest.mark.ranks(2, 3)
def test_matrices_that_torch_rejects_on_one_rank_raise_on_all_ranks(comm):
    x = symmetric(normal(7, 4, 4))
    x[6] = 0
    dist = dc.Distribution(grid_over(comm, n=comm.size), ("n", None, None))
    raises_everywhere(comm, dc.NumericalError, "singular", lambda: L.inv(dc.scatter(x, dist)))
    raises_everywhere(comm, RuntimeError, "square", lambda: L.inv(dc.scatter(x[:, :3].clone(), dist)))


@pytest.mark.usefixtures("fallback")
@pytest.mark.ranks(2, 3)
def test_one_matrix_is_computed_replicated_with_a_warning(comm):
    x = dc.scatter(symmetric(normal(6, 6)), grid_over(comm, n=comm.size), dims="n-")
    with pytest.warns(dc.ReplicationWarning, match="without a batch"):
        y = L.inv(x)
    close(whole(y), L.inv(symmetric(normal(6, 6))), "inverse")


@pytest.mark.ranks(2, 3)
def test_a_failure_on_one_rank_is_torchs_own_error_on_all(comm):
    matrices = torch.eye(3, dtype=torch.float64).repeat(5, 1, 1)
    matrices[4, 0, 0] = -1.0
    grid = dc.ProcessGrid(comm, n=comm.size)
    x = dc.scatter(matrices, grid, dims=("n", None, None))
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        torch.linalg.cholesky(x)
    grid.free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("function", [torch.quantile, torch.nanquantile])
def test_the_gradient_of_plain_quantiles_is_summed_over_ranks(comm, function):
    found = []
    for grid in (None, grid_over(comm, n=comm.size)):
        x, q = normal(7, 4, 5), torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
        y = function(x if grid is None else dc.scatter(x, grid, dims="n--"), q, dim=2)
        (y * y).sum().backward()
        found.append(q.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
def test_a_quantile_of_all_elements_is_that_of_one_process(comm, fallback):
    x = normal(7, 4, 5)
    found = dc.scatter(x, grid_over(comm, n=comm.size), dims="n--").quantile(0.3)
    torch.testing.assert_close(dc.gather(found), x.quantile(0.3))


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning")
@pytest.mark.parametrize("options", [("tol",), ("atol", "rtol"), ("position",)])
def test_tolerances_of_each_matrix(comm, options, fallback):
    """Computed whole on every rank: they broadcast over the batch."""
    x, each = normal(7, 4, 4), normal(7, seed=2).abs()
    given, named = ((each,), {}) if options == ("position",) else ((), dict.fromkeys(options, each))
    expected = L.matrix_rank(x, *given, **named)
    found = L.matrix_rank(
        dc.scatter(x, dc.Distribution(grid_over(comm, n=comm.size), ("n", None, None))), *given, **named
    )
    assert torch.equal(dc.gather(found), expected)
    assert len(set(expected.tolist())) > 1


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim arg is deprecated")
@pytest.mark.parametrize("shape", [(3, 4, 3), (4, 3, 5), (2, 4, 3)])
def test_a_cross_product_without_dim_is_along_the_first_dimension_of_size_3(comm, shape):
    for axes in (("h", None, None), (None, "h", None), (None, None, "h")):
        grid = grid_over(comm, h=comm.size)
        a, b = normal(*shape), normal(*shape, seed=1)
        x, y = (dc.scatter(t, dc.Distribution(grid, axes)) for t in (a, b))
        torch.testing.assert_close(dc.gather(torch.cross(x, y)), torch.cross(a, b), rtol=0, atol=0)
        torch.testing.assert_close(dc.gather(x.cross(y)), a.cross(b), rtol=0, atol=0)
    with pytest.raises(dc.ShapeError, match="no dimension of size 3 in input"):
        torch.cross(x[:2, :2, :2], y[:2, :2, :2])

"""The fallback for functions without a rule: results against one process, warnings and limits."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from distconv.communication.transport import count_traffic
from distconv.layers.common import gathered_call
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere
from tests.layers.compare import close, same_as_one_process, whole
from tests.layers.uneven_layouts import UP_TO_FOUR_RANKS, uneven_layouts

SHAPE = (3, 4, 7, 5)

pytestmark = [
    pytest.mark.usefixtures("fallback"),
    pytest.mark.filterwarnings("ignore::distconv.ReplicationWarning"),
]


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return (x * scale).round()

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        return grad * scale, grad.sum()


def _written(x):
    y = x * 2
    y[torch.tensor([0, 2]), 1] = x.mean()
    y[y > 1] = x[x > 0.5][: int((y > 1).sum())].mean()
    y.index_add_(2, torch.tensor([1, 3]), x[:, :, :2])
    y.masked_scatter_(x > 1, x.flatten())
    return y * x


def _diagonal(x):
    y = x * 2
    y.diagonal(dim1=2, dim2=3).mul_(3)
    y.diagonal(dim1=2, dim2=3)[y.diagonal(dim1=2, dim2=3) < 0] *= -1
    torch.diagonal(y, dim1=0, dim2=1).copy_(x.mean() * torch.arange(3.0, dtype=x.dtype))
    return y * x


IDIOMS = {
    "a function": lambda x: torch.linalg.vander(x),
    "a method": lambda x: x.renorm(2, 1, 0.5),
    "an operator of two": lambda x: torch.cdist(x, x * 2 + 1),
    "an autograd function": lambda x: Rounded.apply(x, torch.tensor(3.0, dtype=torch.float64)),
    "an autograd function of a distributed scalar": lambda x: Rounded.apply(x, x.mean()),
    "a mask": lambda x: x[x > 0] ** 2,
    "masked_select": lambda x: x.masked_select(x > 0.2),
    "a mask of samples": lambda x: x[x.mean((1, 2, 3)) > -1],
    "unique": lambda x: x.detach().round().unique(),
    "nonzero": lambda x: (x > 0).nonzero(),
    "where of a condition": lambda x: torch.where(x > 0)[2],
    "several results": lambda x: torch.linalg.lstsq(x, x * 2 + 1)[0],
    "a list of tensors": lambda x: torch.block_diag(x[0, 0], x[1, 1]),
    "an index by name": lambda x: torch.index_add(x, dim=2, index=torch.tensor([1, 3]), source=x[:, :, :2] * 3),
    "in place": _written,
    "views in place": _diagonal,
    "a shape among the arguments": lambda x: x.new(x.shape).zero_() + x.detach().new(torch.Size([5])).fill_(2) * x,
    "a triangle in place": lambda x: (x * 2).triu_() * x,
    "a plain argument": lambda x: torch.kron(x, torch.full((1, 2, 1, 1), 2.0, dtype=torch.float64)),
    "another dtype seen": lambda x: x.detach().view(torch.int64),
}


@pytest.mark.parametrize("name", IDIOMS)
@UP_TO_FOUR_RANKS
def test_what_has_no_rule_equals_one_process(comm, name):
    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, IDIOMS[name], normal(*SHAPE))


@pytest.mark.ranks(2, 3)
def test_a_result_is_split_again_where_a_dimension_of_an_argument_is_found_again(comm):
    """Samples, whatever becomes of the other dimensions; the gradient goes back to the blocks."""
    dist = dc.Distribution(grid_over(comm, n=comm.size), ("n", None, None))
    for function in (lambda x: torch.renorm(x, 2, 0, 1.0).sum(2), lambda x: torch.cov(x[..., 0])):
        same_as_one_process(dist, function, normal(4, 4, 4))
    found = same_as_one_process(dist, lambda x: torch.linalg.vander(x[..., 0], N=6), normal(4, 4, 4))
    assert found.dist.axes == ("n", None, None)


def test_random_functions_draw_as_one_process_does(comm):
    def drawn(x):
        torch.manual_seed(3)
        return F.rrelu(x, training=True) + torch.poisson(x.detach().abs()) + torch.rand(3, 1, 1, 1)

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, drawn, normal(*SHAPE))


@UP_TO_FOUR_RANKS
def test_a_plain_parameter_has_the_full_gradient_once(comm):
    torch.manual_seed(2)
    for grid in grids(comm, "ncw"):
        same_as_one_process(grid, F.bilinear, normal(6, 4, 5), normal(6, 4, 3), plain=[normal(2, 5, 3, seed=4)])


@UP_TO_FOUR_RANKS
def test_plain_tensors_that_meet_sharded_weights_count_as_replicated(comm):
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.table = nn.Linear(3, 6), nn.Conv1d(2, 6, 1)
            self.conv = nn.Conv2d(4, 6, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            times = torch.linspace(0, 1, 9, dtype=torch.float64).reshape(3, 3)
            positions = self.table(torch.ones(1, 2, 5, dtype=torch.float64))
            return self.conv(x) * self.time(times)[:, :, None, None] + positions[:, :, None]

    for grid in grids(comm, "cn"):
        torch.manual_seed(1)
        model = Embedded().double()
        parallel_model = dc.parallelize(copy.deepcopy(model), grid)
        of = {True: parallel_model, False: model}
        same_as_one_process(grid, lambda x, of=of: of[isinstance(x, dc.DistTensor)](x), normal(*SHAPE))
        for (name, p), q in zip(parallel_model.named_parameters(), model.parameters(), strict=True):
            close(whole(p.grad), q.grad, name)


# -- plain tensors that are written ---------------------------------------------------------------------------------


@UP_TO_FOUR_RANKS
def test_a_plain_buffer_takes_distributed_values(comm):
    def statistics(x):
        buffer, queue = torch.zeros(5, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.float64)
        row = x.detach().mean((0, 1, 2))
        buffer.copy_(row).lerp_(x.detach()[0, 0, 0], 0.3).add_(row, alpha=2)
        queue[1:3] = x.detach()[0, :2, 0]
        queue[0] += row
        queue.index_copy_(0, torch.tensor([3]), row[None])
        return x * buffer + queue.sum(0)

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, statistics, normal(*SHAPE))


@UP_TO_FOUR_RANKS
def test_a_plain_result_takes_gradients(comm):
    def assembled(x):
        y = torch.zeros(3, 5, dtype=torch.float64)
        y[1] = x[0, 0, 0]
        y += x.mean((0, 1, 2))
        return y * 2

    for dist in uneven_layouts(comm, SHAPE):
        same_as_one_process(dist, assembled, normal(*SHAPE))


@UP_TO_FOUR_RANKS
def test_an_output_given_by_the_caller_is_written(comm):
    x, plain = normal(3, 4, 4), torch.zeros(3, 4, 4, dtype=torch.float64)
    for grid in grids(comm, "nw"):
        split = dc.scatter(x, grid)
        out = torch.zeros_like(split)
        assert torch.linalg.inv(split, out=out) is out
        close(whole(out), x.inverse(), "out")
        assert torch.linalg.inv(split, out=plain) is plain
        close(plain, x.inverse(), "plain out")
        values, places = torch.sort(split, 1, out=(torch.zeros_like(split), torch.zeros_like(split).long()))
        close(whole(values), x.sort(1)[0], "values")
        close(whole(places), x.sort(1)[1], "places")


@pytest.mark.ranks(at_least=2)
def test_an_output_of_another_shape_raises(comm):
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size))
    out = torch.zeros_like(x[:, :, 2:])
    with pytest.warns(UserWarning, match="resized"):
        raises_everywhere(comm, dc.UnsupportedOperation, "cannot become one of", lambda: torch.linalg.inv(x, out=out))


@pytest.mark.ranks(at_least=2)
def test_a_view_that_had_to_be_gathered_and_its_source_follow_each_other(comm):
    def changed(x):
        x = x * 2
        y = x.diagonal(dim1=1, dim2=2)
        y.mul_(3).sub_(y.mean())
        x.add_(y.sum())
        return x * y.abs().amax(1)[:, None, None]

    for grid in grids(comm, "nw"):
        same_as_one_process(grid, changed, normal(3, 4, 4))


@pytest.mark.ranks(at_least=2)
def test_a_view_of_other_elements_that_had_to_be_gathered_is_not_changed_in_place(comm):
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "is a copy", lambda: x.view(torch.int64).zero_())


# -- warnings, and unsupported calls -------------------------------------------------------------------------------


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.renorm(x, 2, 0, 1.0)


@pytest.mark.ranks(at_least=2)
def test_a_call_site_warns_once_and_names_the_layer_the_function_and_the_bytes(comm):
    x, model = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size)), nn.Sequential(Layer(), Layer())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x)
    first, second = (str(warning.message) for warning in caught)
    assert first.startswith("'0' (Layer): torch.renorm has no distributed rule;") and "384 bytes" in first
    assert second.startswith("'1' (Layer): ") and {warning.category for warning in caught} == {dc.ReplicationWarning}
    assert {warning.filename for warning in caught} == {__file__}


def test_nothing_is_warned_where_nothing_is_gathered(comm):
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, r=comm.size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(whole(torch.renorm(x, 2, 0, 1.0)), normal(3, 4, 4).renorm(2, 0, 1.0), "y")


@pytest.mark.ranks(at_least=2)
def test_more_than_the_limit_raises(comm, monkeypatch):
    monkeypatch.setattr(gathered_call, "limit_bytes", 383)
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size))
    text = raises_everywhere(comm, dc.UnsupportedOperation, "384 bytes.*=383", lambda: torch.renorm(x, 2, 0, 1.0))
    assert "DISTCONV_FALLBACK_LIMIT" in text


@pytest.mark.fault(12)
def test_as_errors_all_such_calls_raise(comm, monkeypatch):
    monkeypatch.setattr(gathered_call, "level", "error")
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size))
    raises_everywhere(comm, dc.UnsupportedOperation, "no distributed rule", lambda: torch.renorm(x, 2, 0, 1.0))
    raises_everywhere(comm, dc.UnsupportedOperation, "with a mask", lambda: x[x[:, 0, 0] > 0, 0])


@pytest.mark.ranks(at_least=2)
def test_an_autograd_function_that_reaches_a_distributed_tensor_in_another_way_raises(comm):
    x = dc.scatter(normal(3, 4, 4), grid_over(comm, w=comm.size))
    y = x * 2

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * y

    raises_everywhere(comm, dc.UnsupportedOperation, "reached by closure or as an attribute", lambda: Hidden.apply(x))


def test_arguments_that_torch_rejects_raise_its_error(comm):
    x = dc.scatter(normal(3, 4, 5), grid_over(comm, w=comm.size))
    with pytest.raises(RuntimeError, match="renorm: expected maxnorm to be >= 0"):
        torch.renorm(x, 2, 0, -1.0)


def test_a_way_to_call_that_a_rule_does_not_know_is_torchs(comm):
    x, y = normal(4, 6), normal(6, 5)
    for grid in grids(comm, "nc"):
        out = torch.zeros(4, 5, dtype=torch.float64)
        torch.mm(dc.scatter(x, grid), dc.scatter(y, grid), out=out)
        close(out, x @ y, "product")


def test_one_rank_prints_the_warning(mpiexec):
    code = """
import torch
from mpi4py import MPI
import distconv as dc

x = dc.scatter(torch.eye(4, dtype=torch.float64), dc.ProcessGrid(MPI.COMM_WORLD, w=2), dims="-w")
for _ in range(2):
    torch.renorm(x, 2, 0, 1.0)
"""
    ended = mpiexec(2, code, timeout=60)
    assert ended.returncode == 0
    assert ended.stderr.count("ReplicationWarning") == 1


def noisy(x, *generators):
    """A function of another package that draws from several generators."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(noisy, (x,), x, *generators)
    return x + sum(torch.rand(x.shape, generator=each, dtype=x.dtype) for each in generators)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seeds", [(), (1,), (1, 2), (None,)])
def test_each_generator_that_a_function_draws_from_is_compared(comm, seeds):
    def made():
        return [torch.default_generator if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]

    grid, x = grid_over(comm, h=comm.size), normal(*SHAPE)
    torch.manual_seed(0)
    expected = noisy(x, *made())
    torch.manual_seed(0)
    assert torch.equal(whole(noisy(dc.scatter(x, grid), *made())), expected)
    for position in range(len(seeds)):
        generators = made()
        torch.rand(int(comm.rank == 1), generator=generators[position])  # rank 1 has drawn one more number
        call = functools.partial(noisy, dc.scatter(x, grid), *generators)
        raises_everywhere(comm, dc.MismatchError, "random generator", call)


@pytest.mark.ranks(2, 4)
def test_calls_along_dimensions_gather_these_alone(comm):
    """On n x h only the rows of a group of samples are gathered, and along a dimension that is not split nothing."""
    x = normal(4, 3, 6, 5)
    grid = dc.ProcessGrid(comm, n=comm.size // 2, h=2)
    split = dc.scatter(x, grid)
    for dim, parts in ((2, 2), (3, 1), (1, 1)):
        with count_traffic() as traffic:
            found = gathered_call.call_along_dims(lambda block, dim=dim: block.flip(dim), split, [dim])
        assert torch.equal(dc.gather(found), x.flip(dim))
        # Each rank sends its block to the others of its group.
        assert sum(traffic.sent.values()) == (parts - 1) * split.local.nbytes
    grid.free()

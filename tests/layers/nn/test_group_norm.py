"""Group, instance, layer, RMS and local response norm with groups across block borders, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distconv as dc
from tests.distconv.layouts import grid_over, grids, normal, raises_everywhere, twenty_layouts
from tests.layers.compare import UP_TO_SIX_RANKS, built, check_module_same_as_one_process, same_as_one_process

SHAPE = (3, 6, 7, 5)


def with_parameters(make):
    """A module whose parameters are random, the same on all ranks."""

    def made():
        module = make()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module

    return built(made)


def test_group_norm_of_any_layout(comm):
    for dist in twenty_layouts(comm, (5, 6, 7))[::2]:
        same_as_one_process(
            dist, lambda x, w, b: F.group_norm(x, 2, w, b), normal(5, 6, 7), plain=(normal(6), normal(6, seed=1))
        )


def test_distributed_parameters_get_distributed_gradients(comm):
    grid = grid_over(comm, c=comm.size)
    same_as_one_process(
        grid,
        lambda x, w, b: F.group_norm(x, 2, w, b),
        normal(*SHAPE),
        normal(6, seed=1),
        normal(6, seed=2),
        dims=["nchw", "c", "c"],
    )


def test_the_instance_norm_of_aten_equals_one_process(comm):
    mean, var = normal(6, seed=1), normal(6, seed=2).exp()
    for grid in grids(comm, "nch"):
        for own in (True, False):
            running = (None, None) if own else (mean, var)
            call = lambda x, w, b, own=own, r=running: torch.instance_norm(x, w, b, *r, own, 0.1, 1e-5, False)  # noqa: E731
            same_as_one_process(grid, call, normal(*SHAPE), plain=(normal(6, seed=3), normal(6, seed=4)))


@pytest.mark.parametrize("shape", [(5,), (7, 5), (6, 7, 5)], ids=str)
@UP_TO_SIX_RANKS
def test_layer_norm_equals_one_process(comm, shape):
    module = with_parameters(lambda: nn.LayerNorm(shape))
    for grid in grids(comm, "nch"):
        check_module_same_as_one_process(grid, module, 3 * normal(*SHAPE) + 1)
    check_module_same_as_one_process(grid, module, normal(1, 6, 7, 5))


@pytest.mark.parametrize("shape", [(5,), (6, 7, 5)], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_equals_one_process(comm, shape, eps):
    module = with_parameters(lambda: nn.RMSNorm(shape, eps=eps))
    for grid in grids(comm, "ch"):
        check_module_same_as_one_process(grid, module, 3 * normal(*SHAPE) + 1)


def test_a_negative_eps_is_taken_as_in_one_process(comm):
    for grid in grids(comm, "nch"):
        for norm in (
            lambda x: F.group_norm(x, 2, eps=-1e-3),
            lambda x: F.layer_norm(x, (6, 5), eps=-1e-3),
            lambda x: F.layer_norm(x, (6, 5), eps=-10.0),
        ):
            same_as_one_process(grid, norm, normal(2, 4, 6, 5))


@pytest.mark.parametrize("size", [2, 5])
def test_local_response_norm_equals_one_process(comm, size):
    for shape in ((2, 6, 9), (2, 6, 7, 3), (1, 6, 3, 2, 4)):
        for grid in grids(comm, "ncw"):
            same_as_one_process(grid, lambda x: F.local_response_norm(x, size, 0.1, 0.6, 2.0), normal(*shape))


def test_what_follows_may_change_the_result_in_place(comm):
    for grid in grids(comm, "nch"):
        for norm in (lambda x: F.group_norm(x, 2), F.instance_norm, lambda x: F.layer_norm(x, (6, 7, 5))):
            same_as_one_process(grid, lambda x, norm=norm: F.relu(norm(x), inplace=True), normal(*SHAPE))


@pytest.mark.ranks(at_least=2)
def test_evaluation_in_half_precision(comm):
    x = dc.scatter(normal(*SHAPE).bfloat16(), grid_over(comm, c=comm.size))
    mean, var = normal(6, seed=1).float(), normal(6, seed=2).float().exp()
    y = F.instance_norm(x, mean, var, use_input_stats=False, eps=0.0)
    expected = (dc.gather(x).float() - mean.view(6, 1, 1)) / var.sqrt().view(6, 1, 1)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(dc.gather(y), expected.bfloat16(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "call", "error", "match"),
    [
        (SHAPE, lambda x: F.group_norm(x, 4), dc.ShapeError, "divisible by num_groups"),
        (SHAPE, lambda x: F.group_norm(x, 2, torch.ones(5).double()), dc.ShapeError, "weight"),
        (SHAPE, lambda x: F.layer_norm(x, (5, 7)), dc.ShapeError, "Given normalized_shape"),
        ((3, 6, 1), lambda x: F.instance_norm(x), dc.ShapeError, "more than 1 spatial element"),
        # torch's own body says it.
        ((3, 6), lambda x: F.local_response_norm(x, 3), ValueError, "Expected 3D or higher"),
    ],
)
def test_arguments_that_torch_rejects_raise_its_error(comm, shape, call, error, match):
    with pytest.raises((RuntimeError, ValueError), match=match):
        call(normal(*shape))
    x = dc.scatter(normal(*shape), grid_over(comm, n=comm.size))
    raises_everywhere(comm, error, match, lambda: call(x))


def test_parameters_of_another_dtype_raise(comm):
    x = dc.scatter(normal(*SHAPE), grid_over(comm, h=comm.size))
    call = lambda: F.group_norm(x, 2, torch.ones(6), torch.ones(6))  # noqa: E731
    raises_everywhere(comm, dc.ShapeError, "convert the model or the input", call)

"""Where the tensors of a replay lie: memory that stays, views taken once or by one call, values as recorded."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv.capture.buffer_plan import BufferPlan
from distconv.capture.run import record_run
from tests.distconv.capture.trained import assert_equal


def planned_operators(function, *args):
    """Return the names of a step's remaining operators."""
    run = record_run(function, args)
    found = BufferPlan(run.recording, run.outputs(), run.gradient_slots())
    return [str(op.function).removeprefix("aten.") for op in found.operations]


def replayed(function, *args):
    """Return the results of a replay for other values than the recorded ones, after a bitwise comparison."""
    step = dc.capture(function, *(torch.ones_like(a) if a.is_floating_point() else a for a in args), check_every=0)
    results = [step(*args) for _ in range(2)]
    for result in results:
        assert_equal([result], [function(*args)])
    return results


def test_small_results_lie_in_memory_that_stays_and_views_of_them_are_taken_once():
    def step(x):
        pair = torch.stack([x, x * 2]).double()
        first, second = pair.unbind()
        first.sub_(second)
        return first[None].expand(2, -1).exp()

    assert planned_operators(step, torch.ones(4)) == [
        "mul.out",
        "stack.out",
        "copy_.default",
        "sub_.Tensor",
        "exp.default",
    ]
    replayed(step, torch.randn(4))


def test_large_results_are_made_anew():
    def step(x):
        return (x + 1).exp()

    assert planned_operators(step, torch.ones(5000)) == ["add.Tensor", "exp.default"]
    assert planned_operators(step, torch.ones(4000)) == ["add.out", "exp.default"]


def test_a_view_is_one_call_however_many_steps_led_to_it_and_one_that_is_there_is_used():
    def step(x):
        large = x.exp()
        large[1:3, :, 2:] += 1
        return large[1:3, :, 2:].transpose(0, 1).sum(0), large.view(-1)[3:].neg()

    found = planned_operators(step, torch.ones(4, 3, 5))
    assert found.count("as_strided.default") == 3
    assert "copy_.default" not in found  # of the view to itself
    replayed(lambda x: step(x)[0], torch.randn(4, 3, 5))
    replayed(lambda x: step(x)[1], torch.randn(4, 3, 5))


def test_views_of_another_dtype_or_of_complex_numbers_are_taken_as_recorded():
    replayed(lambda x: x.exp().view(torch.int32).bitwise_xor(1), torch.randn(4))
    replayed(lambda x: torch.view_as_real(torch.complex(x.exp(), x).conj().resolve_conj())[1:].neg(), torch.randn(4))
    replayed(lambda x: torch.complex(x.exp(), x).conj().imag[1:].exp(), torch.randn(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("number", [3, 0.1, 1 / 3])
def test_arithmetic_with_numbers_has_the_same_bits(dtype, number):
    def step(x):
        y = (x + number) * number - number
        z = y / number
        if dtype.is_floating_point:
            z.add_(number, alpha=0.7 if isinstance(number, float) else 2).mul_(number).sub_(number).div_(number)
        return z.exp() if dtype is torch.int64 else z.neg()

    values = torch.randn(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = values * 10.0 ** torch.arange(-20, 20).repeat(25)
    replayed(step, values.clamp(-1e6, 1e6).to(dtype) if dtype is torch.int64 else values.to(dtype))


def test_a_tensor_whose_shape_is_changed_in_place_is_left_as_it_is():
    def step(x):
        y = x.exp()
        y.unsqueeze_(0)
        y[:, 1:].neg_()
        return y.squeeze(0).exp()

    replayed(step, torch.randn(4))

"""The choice of the algorithm of the backward pass through time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import distconv as dc
from distconv.kernels import recurrence
from distconv.layers.recurrent.methods import BackwardProblem, Method, fastest_method, parse_method, predict_times

SMALL = BackwardProblem(1000, 1, 20, 1, 1, torch.device("cpu"), torch.float32)


def test_the_compiled_loop_is_chosen_wherever_it_is():
    for steps in (10, 30_000):
        for batch in (1, 256):
            assert fastest_method(replace(SMALL, steps=steps, batch=batch)) is Method.SEQUENTIAL


def test_a_scan_is_chosen_on_many_more_ranks_than_a_state_has_values():
    assert fastest_method(replace(SMALL, ranks=39)) is Method.SEQUENTIAL
    assert fastest_method(replace(SMALL, ranks=40)) is Method.BLELLOCH


def test_without_a_compiled_loop_a_scan_is_chosen_for_few_samples(monkeypatch):
    monkeypatch.setattr(recurrence, "MAX_COMPILED_SIZE", 0)
    assert fastest_method(SMALL) is Method.BLELLOCH
    assert fastest_method(replace(SMALL, batch=64)) is Method.SEQUENTIAL
    assert fastest_method(replace(SMALL, width=200)) is Method.SEQUENTIAL


def test_on_a_gpu_what_is_wide_is_left_to_cudnn_unless_ranks_share_the_time():
    """And what is short: an H200 takes 1.4 ms for 1,000 steps of cuDNN's with 20 values, and 4 for a scan of them."""
    wide = replace(SMALL, device=torch.device("cuda"), width=512, batch=256)
    assert fastest_method(replace(wide, width=20, batch=16)) is Method.AUTOGRAD
    assert fastest_method(replace(wide, width=20, batch=16, steps=10_000)) is Method.BLELLOCH
    assert fastest_method(replace(wide, width=20, batch=16, ranks=4)) is Method.BLELLOCH
    assert fastest_method(wide) is Method.AUTOGRAD
    assert fastest_method(replace(wide, ranks=2)) is Method.SEQUENTIAL


def test_a_scan_grows_less_than_a_sequence():
    one, ten = predict_times(replace(SMALL, width=4)), predict_times(replace(SMALL, width=4, steps=10_000))
    assert ten.sequential_s == pytest.approx(10 * one.sequential_s)
    assert ten.scan_s < 5 * one.scan_s


def test_methods_have_names():
    assert [parse_method(method.value) for method in Method] == list(Method)
    with pytest.raises(dc.UnsupportedOperation, match="method='cublas'"):
        parse_method("cublas")

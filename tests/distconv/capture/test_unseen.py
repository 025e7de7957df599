"""What no operator is called for is told to the recorder, while a step is recorded and in its thread."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.capture.recorder import Recorder
from distconv.capture.state import State
from distconv.capture.unseen import seen

LEAVES = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "dlpack": np.from_dlpack,
    "each element": lambda x: x.apply_(abs),
    "each pair": lambda x: x.map_(x, max),
    "python": lambda x: random.random(),
    "numpys": lambda x: np.random.rand(),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_values_that_leave_torch_are_refused(leave):
    recorder = Recorder(State())
    with seen(recorder):
        LEAVES[leave](torch.ones(2))
    assert recorder.recording.refusals
    assert torch.ones(2).tolist() == [1, 1]
    assert len(recorder.recording.refusals) <= 2  # nothing is told any more


def test_another_thread_may_do_as_it_likes():
    recorder = Recorder(State())
    with seen(recorder):
        thread = threading.Thread(target=lambda: torch.ones(2).tolist())
        thread.start()
        thread.join()
        recorder.paused = True
        torch.ones(2).numpy()
    assert not recorder.recording.refusals


def test_the_generator_is_put_back():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    recorder = Recorder(State())
    with seen(recorder), recorder:
        state = torch.get_rng_state()
        torch.rand(3)
        torch.set_rng_state(state)
        torch.manual_seed(9)
        torch.rand(2)
    recorder.put_back()
    assert torch.equal(torch.get_rng_state(), before)
    assert not recorder.recording.refusals


def test_a_generator_that_is_set_past_torch_is_noticed():
    recorder = Recorder(State())
    with seen(recorder), recorder:
        torch.rand(3)
        torch.default_generator.manual_seed(3)
        torch.rand(3)
    assert [each.reason for each in recorder.recording.refusals] == [
        "the random generator has been set by something that cannot be seen"
    ]
    recorder.put_back()


def test_torch_lists_its_own_getters_inside():
    """It lists them once, when ``torch._dynamo`` is loaded, say, which may be while a step is recorded."""
    getters = torch.overrides.get_default_nowrap_functions
    before = getters()
    getters.cache_clear()
    with seen(Recorder(State())):
        assert torch.Tensor.grad.__get__ not in before
        assert getters() == before


@pytest.mark.ranks(at_least=2)
def test_a_plain_tensor_set_to_a_distributed_one_gets_its_values_while_a_step_is_recorded(comm, fallback):
    x = dc.scatter(torch.arange(7.0), dc.ProcessGrid(comm, n=comm.size), dims="n")
    plain, recorder = torch.zeros(7), Recorder(State())
    with seen(recorder), pytest.warns(dc.ReplicationWarning):
        plain.data = x
    assert type(plain.data) is torch.Tensor and plain.tolist() == [*map(float, range(7))]
    assert recorder.recording.refusals

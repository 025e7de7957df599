"""Values that leave torch and generators that are set are reported, while a step is recorded and in its thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.capture.gradients import SavedGradients
from distconv.capture.python_access import report_accesses
from distconv.capture.recorder import StepRecorder

LEAVES = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "dlpack": np.from_dlpack,
    "each element": lambda x: x.apply_(abs),
    "each pair": lambda x: x.map_(x, max),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_values_that_leave_torch_are_refused(leave):
    recorder = StepRecorder(SavedGradients())
    with report_accesses(recorder, SavedGradients()):
        LEAVES[leave](torch.ones(2))
    assert recorder.recording.unsupported
    assert torch.ones(2).tolist() == [1, 1]
    assert len(recorder.recording.unsupported) <= 2  # nothing is told any more


def test_another_thread_may_do_as_it_likes():
    recorder = StepRecorder(SavedGradients())
    with report_accesses(recorder, SavedGradients()):
        thread = threading.Thread(target=lambda: torch.ones(2).tolist())
        thread.start()
        thread.join()
        recorder.paused = True
        torch.ones(2).numpy()
    assert not recorder.recording.unsupported


def test_the_generator_is_put_back():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    recorder = StepRecorder(SavedGradients())
    with report_accesses(recorder, SavedGradients()), recorder:
        state = torch.get_rng_state()
        torch.rand(3)
        torch.set_rng_state(state)
        torch.manual_seed(9)
        torch.rand(2)
    recorder.restore()
    assert torch.equal(torch.get_rng_state(), before)
    assert not recorder.recording.unsupported


def test_torch_lists_its_own_getters_inside():
    """It lists them once, when ``torch._dynamo`` is loaded, say, which may be while a step is recorded."""
    getters = torch.overrides.get_default_nowrap_functions
    before = getters()
    getters.cache_clear()
    with report_accesses(StepRecorder(SavedGradients()), SavedGradients()):
        assert torch.Tensor.grad.__get__ not in before
        assert getters() == before


@pytest.mark.ranks(at_least=2)
def test_a_plain_tensor_set_to_a_distributed_one_gets_its_values_while_a_step_is_recorded(comm, fallback):
    x = dc.scatter(torch.arange(7.0), dc.ProcessGrid(comm, n=comm.size), dims="n")
    plain, recorder = torch.zeros(7), StepRecorder(SavedGradients())
    with report_accesses(recorder, SavedGradients()), pytest.warns(dc.ReplicationWarning):
        plain.data = x
    assert type(plain.data) is torch.Tensor and plain.tolist() == [*map(float, range(7))]
    assert recorder.recording.unsupported

"""A rank that runs out of memory: the job ends with that rank, its layer, what was asked for and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distconv.process.memory.out_of_memory import explain_memory_error

HUGE = 1 << 45


class Greedy(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(HUGE)


class GreedyDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad + torch.empty(HUGE)


def explained(action: Any) -> str:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        action()
    return explain_memory_error(caught.value, caught.tb)


def test_the_layer_and_the_bytes_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(Greedy()))
    text = explained(lambda: model(torch.zeros(1)))
    assert "out of memory in '1.0' (Greedy): asked for 140737488355328 bytes, this process has had " in text
    assert "distconv plan --memory" in text


def test_in_a_backward_pass_the_operator_is_named() -> None:
    x = torch.zeros(1, requires_grad=True)
    text = explained(lambda: GreedyDerivative.apply(x).sum().backward())
    assert "out of memory in the derivative of GreedyDerivative: asked for 140737488355328 bytes" in text


def test_memory_that_numpy_or_python_asks_for_counts_too() -> None:
    assert "out of memory: asked for 256. TiB" in explained(lambda: np.empty(HUGE))
    assert "out of memory: asked for more" in explained(lambda: bytearray(1 << 62))


def test_what_a_gpu_says_is_understood() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of")
    assert "asked for 20.00 GiB" in explain_memory_error(error, None)


def test_another_error_gets_no_explanation() -> None:
    assert explain_memory_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None) == ""
    assert explain_memory_error(None, None) == ""


@pytest.mark.fault(53)
def test_a_rank_without_memory_ends_the_job(mpiexec: Any) -> None:
    code = """
        import torch, torch.nn as nn
        from mpi4py import MPI
        import distconv as dc
        from tests.distconv.process.memory.test_out_of_memory import Greedy
        dc.ProcessGrid(MPI.COMM_WORLD, n=2)
        if MPI.COMM_WORLD.rank == 1:
            nn.Sequential(Greedy())(torch.zeros(1))
        MPI.COMM_WORLD.Barrier()
    """
    ended = mpiexec(2, code, timeout=60)
    assert ended.returncode == 1
    assert "rank 1 failed" in ended.stderr
    assert "out of memory in '0' (Greedy): asked for 140737488355328 bytes" in ended.stderr

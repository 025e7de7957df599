"""One rank that does its list of actions: errors that say in which, gradients that are cleared, what it forgets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from distconv.pipeline import Pipeline, PipelineError
from tests.distconv.layouts import normal
from tests.pipeline.training import SGD


class FailsBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("only here")


class FailsInBackward(nn.Module):
    def forward(self, x):
        return FailsBehind.apply(x)


class FailingSGD(torch.optim.SGD):
    def step(self):
        raise ValueError("only here")


def failing_loss(y, target):
    raise ValueError("only here")


@pytest.mark.parametrize(
    ("stage", "given", "where"),
    [
        (FailsInBackward, {}, "B of micro-batch 0"),
        (nn.Identity, {"loss": failing_loss}, "F of micro-batch 0"),
        (nn.Identity, {"optimizer": FailingSGD}, "update"),
    ],
    ids=["backward", "loss", "optimizer"],
)
def test_an_exception_in_a_pass_keeps_its_type_and_has_a_note_of_its_position(stage, given, where):
    stages = [nn.Sequential(nn.Linear(4, 4), stage())]
    pipe = Pipeline(stages, MPI.COMM_SELF, "gpipe", **{"loss": F.mse_loss, "microbatches": 2, "optimizer": SGD} | given)
    with pytest.raises(ValueError, match="only here") as raised:
        pipe.step(torch.ones(8, 4), torch.ones(8, 4))
    assert str(raised.value) == "only here"
    assert len(raised.value.__notes__) == 1 and raised.value.__notes__[0].startswith(f"rank 0, stage 0: {where}")
    pipe.close()


def train_one_step(comm, layer, x, *, split=False):
    """The gradients that a step leaves behind, in which nothing is updated."""
    pipe = Pipeline([layer], comm, "zero-bubble" if split else "gpipe", F.mse_loss, 2)
    pipe.step(x, x)
    pipe.close()
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize("split", [False, True])
def test_gradients_begin_anew_in_each_mini_batch(split):
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    x, y = normal(5, 3), normal(4, 3, seed=1)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)  # a caller's own are none of ours
    train_one_step(MPI.COMM_SELF, layer, x, split=split)
    found = train_one_step(MPI.COMM_SELF, layer, y, split=split)
    expected = torch.autograd.grad(F.mse_loss(layer(y), y), list(layer.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2, 3)
def test_replicas_that_were_given_other_samples_are_an_error_that_names_both(comm):
    own, other = (6, 8) if comm.rank == 0 else (8, 6)
    torch.manual_seed(0)
    pipe = Pipeline([nn.Linear(2, 2).double()], comm, "gpipe", F.mse_loss, comm.size, replicas=comm.size)
    x = normal(own, 2)
    words = f"update: replica . has a mini-batch of {other} samples, but this rank has {own}"
    with pytest.raises(PipelineError, match=words):
        pipe.step(x, x)


@pytest.mark.ranks(1, 2)
def test_a_long_run_keeps_nothing_of_mini_batches_that_are_done(comm):
    torch.manual_seed(0)
    pipe = Pipeline([nn.Linear(2, 2) for _ in range(comm.size)], comm, "stale", F.mse_loss)
    x, kept = torch.ones(2, 2), []
    for _ in range(12):
        pipe.step(x, x)
        one = pipe._executor
        kept.append((len(one._microbatches), len(one.losses), len(one._boundary_tensors)))
    assert len(set(kept[4:])) == 1
    assert max(kept[-1]) <= 2 * comm.size
    pipe.close()

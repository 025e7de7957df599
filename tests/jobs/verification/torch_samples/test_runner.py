"""torch's samples over ranks: a quick choice of them, and what must be noticed."""

from __future__ import annotations

import pytest
import torch

from distconv import dispatch
from distconv.errors import UnsupportedOperation
from distconv.jobs.verification.conformance.runner import EXACT, Verdict
from distconv.jobs.verification.torch_samples import database
from distconv.jobs.verification.torch_samples.database import Sample
from distconv.jobs.verification.torch_samples.runner import Run
from tests.distconv.layouts import normal

pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.usefixtures("fallback"),
    pytest.mark.filterwarnings("ignore:.*Tensor support is in beta state"),
]

QUICK = [
    "add", "cumsum", "linalg.inv", "linalg.svd", "masked_select", "index_put", "index_add", "max.binary",
    "nonzero", "searchsorted", "sort", "take", "trace", "unique", "unfold", "where", "nn.functional.embedding",
    "nn.functional.rrelu", "nn.functional.ctc_loss", "nn.functional.pdist", "nn.Bilinear", "nn.Conv2d", "nn.LSTMCell",
    "nn.MultiMarginLoss",
]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_equals_one_process(comm, name):
    run = Run(comm)
    lines = [line for sample in database.samples(name, 1) for line in run.lines(sample)]
    assert lines
    assert not [line for line in lines if line.verdict not in EXACT]


def found(comm, function):
    run = Run(comm)
    lines = list(run.lines(Sample("none", "0", function, (normal(5, 4),), {})))
    assert len(set(comm.allgather(str(lines)))) == 1
    return lines[0]


def unwilling(x):
    """A function of a user's that only the tests know."""
    return torch.overrides.handle_torch_function(unwilling, (x,), x) if type(x) is not torch.Tensor else x * 2


def test_bytes_are_told_of_what_is_exact(comm):
    assert found(comm, lambda x: x * 2).verdict is Verdict.EXACT
    line = found(comm, lambda x: x.t().reshape(20))
    assert line.verdict is Verdict.REDISTRIBUTES and line.moved_bytes > 0
    line = found(comm, lambda x: torch.linalg.svdvals(x.detach()))
    # Every block goes to all other ranks.
    assert line.verdict is Verdict.REPLICATES and line.moved_bytes == 5 * 4 * 8 * (comm.size - 1)


@pytest.mark.parametrize(
    ("error", "on", "verdict", "text"),
    [
        (UnsupportedOperation("no rule; gather it first"), (0, 1, 2, 3), Verdict.RAISES, "no rule"),
        (UnsupportedOperation("it has no rule"), (0, 1, 2, 3), Verdict.UNCLEAR, "it has no rule"),
        (KeyError("h"), (0, 1, 2, 3), Verdict.UNCLEAR, "KeyError: 'h'"),
        (UnsupportedOperation("no rule; gather it first"), (1,), Verdict.WRONG, "ranks differ: rank 0"),
    ],
)
def test_an_error_counts_only_if_it_is_ours_everywhere_and_helps(comm, monkeypatch, error, on, verdict, text):
    def operator(x):
        if comm.rank in on:
            raise error
        return x * 2

    monkeypatch.setitem(dispatch._RULES, unwilling, dispatch.Rule(operator))
    line = found(comm, unwilling)
    assert line.verdict is verdict and text in line.text


def test_another_number_is_wrong_and_what_torch_refuses_is_left_out(comm, monkeypatch):
    monkeypatch.setitem(dispatch._RULES, unwilling, dispatch.Rule(lambda x: x * 2.000001))
    assert found(comm, unwilling).verdict is Verdict.WRONG
    assert not list(Run(comm).lines(Sample("none", "0", torch.linalg.inv, (normal(5, 4),), {})))

"""Cases in both worlds: samples without elements, what must be noticed, and the bytes that are counted."""

from __future__ import annotations

import pytest
import torch

import distconv as dc
from distconv import dispatch
from distconv.errors import UnsupportedOperation
from distconv.jobs.verification.conformance import samples
from distconv.jobs.verification.conformance.samples import Sample
from distconv.jobs.verification.conformance.table import Input, case
from distconv.jobs.verification.engine.runner import CaseRun
from distconv.jobs.verification.engine.verdicts import BAD, Verdict
from tests.distconv.layouts import normal

X = Input("N C H W")


# -- torch's samples -------------------------------------------------------------------------------------------------

WITHOUT_ELEMENTS = [
    "max.reduction_no_dim", "max.reduction_with_dim", "aminmax", "argmin", "mean", "var", "nn.functional.conv2d",
    "nn.functional.conv_transpose2d", "nn.functional.interpolate.nearest", "nn.functional.interpolate.bilinear",
    "nn.functional.interpolate.area", "nn.functional.pixel_unshuffle", "nn.functional.channel_shuffle",
    "nn.functional.adaptive_avg_pool2d", "nn.functional.avg_pool2d", "nn.functional.batch_norm",
    "nn.functional.group_norm", "nn.functional.instance_norm", "nn.functional.glu", "nn.functional.grid_sample",
    "nn.functional.scaled_dot_product_attention", "nn.functional.one_hot", "nn.functional.nll_loss", "__getitem__",
    "view_as_complex", "gather", "nn.Linear", "nn.LSTM",
]  # fmt: skip


@pytest.mark.ranks(3)
@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_a_sample_without_elements_is_computed_or_rejected_as_in_one_process(comm, name):
    run = CaseRun(comm)
    lines = [line for sample in samples.emptied(name) for line in run.lines("none", sample)]
    assert lines and not [line for line in lines if line.verdict in BAD]


def found(comm, function):
    run = CaseRun(comm)
    lines = list(run.lines("none", Sample("none", "0", function, (normal(5, 4),), {})))
    assert len(set(comm.allgather(str(lines)))) == 1
    return lines[0]


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("fallback")
def test_bytes_are_told_of_what_is_exact(comm):
    assert found(comm, lambda x: x * 2).verdict is Verdict.EXACT
    line = found(comm, lambda x: x.t().reshape(20))
    assert line.verdict is Verdict.REDISTRIBUTES and line.moved_bytes > 0
    line = found(comm, lambda x: torch.renorm(x.detach(), 2, 0, 1.0))
    # Every block goes to all other ranks.
    assert line.verdict is Verdict.REPLICATES and line.moved_bytes == 5 * 4 * 8 * (comm.size - 1)


@pytest.mark.ranks(2, 3)
def test_another_number_is_wrong_and_what_torch_refuses_is_left_out(comm, monkeypatch):
    monkeypatch.setitem(dispatch._RULES, unwilling, dispatch.OperatorRule(lambda x: x * 2.000001))
    assert found(comm, unwilling).verdict is Verdict.WRONG
    assert not list(CaseRun(comm).lines("none", Sample("none", "0", torch.linalg.inv, (normal(5, 4),), {})))


# -- what it must notice ------------------------------------------------------------------------------------------


def verdicts(comm, function, *inputs):
    lines = list(CaseRun(comm).lines("none", case("none", "", function, *(inputs or (X,)))))
    assert len(set(comm.allgather(str(lines)))) == 1
    return {line.layout: line for line in lines}


@pytest.mark.ranks(4)
def test_it_says_what_is_exact_and_what_redistributes(comm):
    found = verdicts(comm, lambda x: x.flatten(1) * 2)
    assert found["samples"].verdict is Verdict.EXACT
    assert found["samples"].moved_bytes == 0
    line = found["height"]
    assert line.verdict is Verdict.REDISTRIBUTES
    # 7 rows over 4 ranks become whole on each: every block goes to the three others. Back nothing needs to move.
    assert line.moved_bytes == 5 * 4 * 7 * 9 * 8 * 3


@pytest.mark.ranks(4)
def test_halos_and_sums_are_no_redistribution(comm):
    found = verdicts(comm, lambda x: torch.nn.functional.max_pool2d(x, 3, 1, 1).mean())
    assert found["height"].verdict is Verdict.EXACT
    assert found["height"].halo_bytes > 0
    assert found["height"].reduced_bytes == 8 * 4


@pytest.mark.ranks(2, 3)
def test_a_gradient_that_is_not_summed_is_wrong(comm, monkeypatch):
    monkeypatch.setattr("distconv.communication.collectives.allreduce", lambda comm, tensor, what: tensor)
    weight = Input("c 1 1", layout="plain")
    found = verdicts(comm, lambda x, w: x * w, X, weight)
    assert found["height"].verdict is Verdict.WRONG
    assert "dL/dx1" in found["height"].text
    assert found["nothing split"].verdict is Verdict.EXACT


def unwilling(x):
    """A function of a user's that only the tests know."""
    return torch.overrides.handle_torch_function(unwilling, (x,), x) if isinstance(x, dc.DistTensor) else x * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("error", "on", "verdict", "text"),
    [
        (UnsupportedOperation("no rule; gather it first"), (0, 1), Verdict.RAISES, "no rule; gather it first"),
        (UnsupportedOperation("it has no rule"), (0, 1), Verdict.UNCLEAR, "it has no rule"),
        (UnsupportedOperation("no rule; gather it first"), (1,), Verdict.WRONG, "ranks differ: rank 0"),
        (KeyError("h"), (0, 1), Verdict.UNCLEAR, "KeyError: 'h'"),
    ],
)
def test_an_error_counts_only_if_it_is_ours_everywhere_and_helps(comm, monkeypatch, error, on, verdict, text):
    def operator(x):
        if comm.rank in on:
            raise error
        return x * 2

    monkeypatch.setitem(dispatch._RULES, unwilling, dispatch.OperatorRule(operator))
    line = verdicts(comm, unwilling)["height"]
    assert line.verdict is verdict
    assert text in line.text


# -- bytes --------------------------------------------------------------------------------------------------------

"""Training on sequences: the same numbers on every grid and by every way back through time."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.jobs.sequence import samples
from distconv.jobs.sequence import trainer as trainer_module
from distconv.jobs.sequence.mfcc import CoefficientRecipe
from distconv.jobs.sequence.samples import SequenceSamples
from distconv.jobs.sequence.trainer import SequenceNetwork, SequenceSettings, SequenceTrainer
from distconv.layers.recurrent import ScanGRU, ScanRNN
from tests.distconv.layouts import grid_over, grids, raises_everywhere
from tests.jobs.approved import assert_approved_defaults

SETTINGS = SequenceSettings(width=4, batch=6, steps=4, dtype="float64", length=9)


@pytest.fixture(autouse=True)
def few_streams(monkeypatch):
    monkeypatch.setattr(samples, "STREAMS", {"train": (20, 0), "test": (10, 1)})


def trained(comm, grid, **options):
    trainer = SequenceTrainer(
        SETTINGS, SequenceSamples(None, comm, length=9, recipe=CoefficientRecipe()), grid, **options
    )
    for batch in trainer.batches():
        trainer.step(*batch.tensors)
    return trainer


@pytest.mark.ranks(at_most=4)
def test_grids_and_methods_change_no_loss(comm):
    alone = trained(comm, grid_over(comm, r=comm.size) if comm.size == 1 else dc.ProcessGrid(comm, n=comm.size))
    for grid in grids(comm, "nw"):
        for method in ("sequential", "blelloch"):
            found = trained(comm, grid, method=method)
            assert [loss for _, loss in found.losses] == pytest.approx([loss for _, loss in alone.losses], rel=1e-10)
            assert found.evaluate("test").loss == pytest.approx(alone.evaluate("test").loss, rel=1e-9)


def test_what_is_padded_does_not_count(comm):
    trainer = trained(comm, grid_over(comm, n=comm.size))
    x = torch.zeros(2, 5, 2, dtype=torch.float64)
    x[:, 2, 1] = 1
    x[1, 3:, 0] = 7
    y = dc.gather(trainer.model(dc.scatter(x, trainer.grid, dims="nw-")))
    assert torch.equal(y[0], y[1])


@pytest.mark.ranks(2)
def test_an_axis_that_cuts_nothing_is_refused(comm):
    grid = grid_over(comm, h=2)
    raises_everywhere(comm, dc.GridError, "sequences have no axis h", lambda: trained(comm, grid))


def test_an_answer_is_the_state_behind_the_last_step_of_each_sequence():
    """As torch's own layer has it that sees one sequence at a time, without what pads it and without the mark."""
    torch.manual_seed(0)
    network, plain = SequenceNetwork(ScanGRU(2, 5, batch_first=True), 3).double(), torch.nn.GRU(2, 5, batch_first=True)
    plain.double().load_state_dict(network.recurrent.state_dict())
    lengths, x = (4, 1, 6), torch.randn(3, 6, 3, dtype=torch.float64)
    x[..., 2] = 0
    for row, length in enumerate(lengths):
        x[row, length - 1, 2] = 1
    found = network(x)
    for row, length in enumerate(lengths):
        _, last = plain(x[row : row + 1, :length, :2])
        torch.testing.assert_close(found[row], network.head(last[0, 0]))


def test_settings_are_as_approved_and_reach_the_layer_and_the_loaders(monkeypatch):
    assert_approved_defaults("sequence", SequenceSettings(), CoefficientRecipe())
    seen = []

    class Loader:
        samples, steps = 5, 1

        def __init__(self, samples, group, grid, batch, **options):
            seen.append((group, batch, options))

    monkeypatch.setattr(trainer_module, "SequenceLoader", Loader)
    monkeypatch.setattr(trainer_module, "accumulate_batches", lambda parts, count: count)
    source = SequenceSamples(None, MPI.COMM_SELF, length=9, recipe=CoefficientRecipe())
    assert (source.name, source.class_names, source.channels) == ("bitstreams", tuple("0123456789"), 1)
    settings = SequenceSettings("rnn", 7, batch=6, accumulate=2, seed=4, epochs=1)
    trainer = SequenceTrainer(settings, source, dc.ProcessGrid(MPI.COMM_SELF), method="blelloch")
    trainer.batches_of("test")
    training = {"seed": 4, **settings.loader_options("cpu")}
    assert seen == [("train", 3, training), ("test", 6, settings.evaluation_options("cpu"))] and trainer.loader == 2
    torch.manual_seed(4)
    layer = ScanRNN(1, 7, batch_first=True)
    for name, value in layer.state_dict().items():
        assert torch.equal(trainer.model.recurrent.state_dict()[name], value)
    assert trainer.model.head.weight.shape == (10, 7) and trainer.notes == {"task": "sequence"}
    assert str(trainer.model.recurrent.method).rpartition(".")[2].lower() == "blelloch"

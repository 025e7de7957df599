"""``distconv bench sparse``: equal gradients of what it compares, the printed text, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from distconv import cli
from distconv.jobs.bench.child_processes import Peak
from distconv.jobs.bench.layers import sparse
from tests.jobs.bench import command
from tests.jobs.command_lines import assert_refused

printing = command.printing


def test_a_surface_has_the_voxels_it_should_each_once_most_with_neighbours() -> None:
    coords = sparse.surface(20)
    assert coords.shape == (3200, 4) == coords.unique(dim=0).shape
    assert coords[:, 0].eq(0).all() and coords.min() == 0 and coords.max() == 19
    filled = torch.zeros(22, 22, 22)
    filled[tuple(coords[:, 1:].T + 1)] = 1
    around = torch.nn.functional.avg_pool3d(filled[None], 3, 1)[0] * 27
    inside = around[tuple(coords[:, 1:].T)]
    # A layer of one voxel has 9 about each, a block 27.
    assert 8 < float(inside.mean()) < 18


def test_sparse_and_dense_compute_the_same_gradient() -> None:
    names = (sparse.SPARSE, sparse.BUILT, sparse.DENSE)
    found = [step() for step in sparse.variants(9, 3, names).values()]
    for gradient in found[:2]:
        torch.testing.assert_close(gradient, found[2], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", [sparse.SPARSE, sparse.DENSE])
def test_a_process_of_its_own_prints_its_memory(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.main(["bench", "sparse", "--alone", name, "--resolution", "6", "--channels", "2"]) == 0
    peak = Peak(**json.loads(capsys.readouterr().out))
    assert peak.peak >= peak.before > 0


@pytest.mark.ranks(2)
def test_several_ranks_are_refused(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["bench", "sparse"], "measures one process, but there are 2 ranks")


def test_the_printed_text_is_as_approved(printing: command.Printing, monkeypatch: pytest.MonkeyPatch) -> None:
    def instead(words: list[str]) -> Peak:
        printing.seen.append(" ".join(words))
        return Peak(1 << 20, (1 + len(printing.seen)) << 22, 0.0)

    monkeypatch.setattr(sparse, "run_in_new_process", instead)
    small = ["sparse", "--resolution", "6", "9", "--channels", "3", "--rounds", "3"]
    printing.approve("sparse", sparse, *small)
    monkeypatch.setattr(sparse, "dense_bytes", lambda resolution, channels: resolution << 28)
    printing.approve("sparse-capped", sparse, *small, "--cap", "2")

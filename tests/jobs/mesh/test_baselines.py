"""What a network has to beat does not depend on the grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpi4py import MPI

import distconv as dc
from distconv.jobs.mesh import baselines
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.scores import judge
from distconv.jobs.mesh.segmentation import Trainer
from tests.jobs.mesh.mesh_files import GRIDS, SMALL, on_ranks, written


@on_ranks
def test_scores_do_not_depend_on_the_grid(comm: Any, shared_tmp_path: Path) -> None:
    path = written(shared_tmp_path / "mesh.h5", comm)
    found = []
    for ranks, axes in ((comm, GRIDS[comm.size]), (MPI.COMM_SELF, {})):
        samples = MeshSamples(path, ranks, extrapolated=True)
        trainer = Trainer(SMALL, samples, dc.ProcessGrid(ranks, **axes))
        verdicts = [*baselines.constant_answers(samples), baselines.best_channel(samples)]
        verdicts += baselines.extrapolation(samples, 0.4)
        verdicts.append(judge("unet", trainer.scores("train"), trainer.scores("heldout")))
        found.append(verdicts)
        samples.close()
    assert found[0] == found[1]

"""The same samples through torch's DTensor (gloo, CPU), for comparison: every tensor split along its last dimension.

The parameters of modules are replicated, and gradients come as their results lie, as DTensor asks. A sample is exact;
it raises (an exception of one kind on all ranks that speaks of DTensor or sharding); it is UNCLEAR (any other exception
on all ranks), WRONG (another number, or ranks that part ways), or it HANGS.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from distconv.grid import ProcessGrid
from distconv.jobs.verification.conformance.runner import Line, Verdict
from distconv.jobs.verification.differential.verdicts import Refusal, difference
from distconv.jobs.verification.differential.watch import Watch
from distconv.jobs.verification.torch_samples.attempt import Found, Split, attempt
from distconv.jobs.verification.torch_samples.database import Sample
from distconv.jobs.verification.torch_samples.runner import DTENSOR, TIME_LIMIT_S

_OWN_WORDS = ("DTensor", "shard", "placement", "mesh")
"""An error with one of them says that DTensor lacks something."""


@dataclass(frozen=True)
class _Split(Split):
    mesh: DeviceMesh

    def put(self, value: torch.Tensor, grid: ProcessGrid) -> torch.Tensor:
        return distribute_tensor(value, self.mesh, [Shard(value.dim() - 1)], src_data_rank=None)

    def gradient(self, whole: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not isinstance(y, DTensor):
            return whole
        placements = [Replicate() if isinstance(p, Partial) else p for p in y.placements]
        return distribute_tensor(whole, y.device_mesh, placements, src_data_rank=None)


class Run:
    """A run on all ranks of the job."""

    def __init__(self, comm: MPI.Intracomm, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.comm = comm
        self._watch = Watch(comm, time_limit_s)
        self._grid = ProcessGrid(comm, w=comm.size)
        meeting = comm.bcast(Path(tempfile.mkdtemp()) / "ranks")
        patience = datetime.timedelta(seconds=2 * time_limit_s)
        torch.distributed.init_process_group("gloo", f"file://{meeting}", patience, comm.size, comm.rank)
        self._split = _Split("last", None, "w", True, DeviceMesh("cpu", list(range(comm.size))))

    def lines(self, sample: Sample) -> Iterator[Line]:
        """What comes of ``sample``; nothing where torch itself refuses it. Collective."""
        reference = attempt(sample, lambda failed: failed, None, None)
        if reference.refused is not None:
            return
        self._watch.begin(sample.name)
        with self._watch.running():
            verdict, text = self._judged(sample, reference)
        place = (DTENSOR, sample.operator, sample.option, self._split.name, self._grid.describe(), self.comm.size)
        yield Line(*place, verdict, text)

    def _judged(self, sample: Sample, reference: Found) -> tuple[Verdict, str]:
        build = sample.module
        if build is not None:
            sample = replace(sample, module=lambda: distribute_module(build(), self._split.mesh))
        found = attempt(sample, self._together, self._split, self._grid)
        refused = self.comm.allgather(found.refused)
        if any(refused):
            return judged(refused)
        # Assembled only where the ranks agree on what there is: else some would wait for ever.
        names = self.comm.allgather([(name, isinstance(y, DTensor)) for name, y in found.values.items()])
        if names.count(names[0]) < len(names):
            return Verdict.WRONG, "ranks have different results"
        whole = {name: y.full_tensor() if isinstance(y, DTensor) else y for name, y in found.values.items()}
        texts = [text for text in self.comm.allgather(difference(reference.values, whole)) if text]
        return (Verdict.WRONG, texts[0]) if texts else (Verdict.EXACT, "")

    def _together(self, failed: bool) -> bool:
        return bool(self.comm.allreduce(failed, MPI.LOR))


def judged(refused: Sequence[Refusal | None]) -> tuple[Verdict, str]:
    """The verdict on a sample that some ranks refuse."""
    kinds = {each and each.kind for each in refused}
    told = "; ".join(dict.fromkeys("computes" if each is None else f"{each.kind}: {each.text}" for each in refused))
    if len(kinds) > 1:
        return Verdict.WRONG, f"ranks differ: {told}"
    ours = any(word.lower() in told.lower() for word in _OWN_WORDS)
    return (Verdict.RAISES if ours else Verdict.UNCLEAR), told

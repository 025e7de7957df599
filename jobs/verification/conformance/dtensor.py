"""torch's samples through torch's DTensor (gloo, CPU), for comparison. Tensors are split along the last dimension.

Parameters of modules are replicated. Gradients have the placements of their results, as DTensor requires. A sample is
exact; raises (the same kind of exception on all ranks, which mentions DTensor or sharding); is UNCLEAR (any other
exception on all ranks) or WRONG (a different value, or different outcomes on ranks); or HANGS.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from distconv.grid import ProcessGrid
from distconv.jobs.verification.engine import backends, runner
from distconv.jobs.verification.engine.layouts import CaseLayout
from distconv.jobs.verification.engine.verdicts import RankOutcome, Refusal, Verdict, classify

_DTENSOR_WORDS = ("DTensor", "shard", "placement", "mesh")
"""Words of errors that report a limitation of DTensor, in upper or lower case."""


class _DTensorBackend(backends.DistributedBackend):
    # ``layout`` and ``balanced`` have no effect: all tensors are split along their last dimension.

    def __init__(self, grid: ProcessGrid, layout: CaseLayout, fails: Callable[[bool], bool], mesh: DeviceMesh) -> None:
        super().__init__(grid, layout, fails)
        self.mesh = mesh

    def put(
        self, value: torch.Tensor, dims: backends.Dims = None, grad: bool = True, *, balanced: bool = False
    ) -> torch.Tensor:
        full = value.detach().clone()
        # Every rank has the full tensor. Without src_data_rank=None, rank 0 would send its blocks.
        x = distribute_tensor(full, self.mesh, [Shard(value.dim() - 1)], src_data_rank=None)
        return x.requires_grad_(grad)

    def model(self, module: nn.Module, parallel: bool = True) -> nn.Module:
        return distribute_module(module, self.mesh)

    def direction(self, whole: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not isinstance(y, DTensor):
            return whole
        # A gradient cannot have the placement of a partial sum.
        placements = [Replicate() if isinstance(p, Partial) else p for p in y.placements]
        return distribute_tensor(whole, y.device_mesh, placements, src_data_rank=None)

    def record(self, name: str, tensor: torch.Tensor | None) -> None:
        super().record(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


class DTensorRun(runner.CaseRun):
    """A run that computes cases with DTensors. Collective: construct it on every rank."""

    def __init__(self, comm: MPI.Intracomm, time_limit_s: float = runner.TIME_LIMIT_S) -> None:
        super().__init__(comm, time_limit_s)
        # gloo's processes find each other by a file, which needs no free port. All ranks use the folder of rank 0.
        rendezvous = comm.bcast(Path(tempfile.mkdtemp()) / "ranks")
        # Longer than the limit of the engine, which must end a hanging job first: it names the case.
        timeout = datetime.timedelta(seconds=2 * time_limit_s)
        torch.distributed.init_process_group("gloo", f"file://{rendezvous}", timeout, comm.size, comm.rank)
        self._mesh = DeviceMesh("cpu", list(range(comm.size)))

    def layouts(self, case: runner.Case) -> Sequence[CaseLayout]:
        """Return the one layout: every tensor is split along its last dimension."""
        return [CaseLayout("last", (("w", self.comm.size),))]

    def backend(self, case: runner.Case, layout: CaseLayout, grid: ProcessGrid) -> backends.ReferenceBackend:
        """Return the backend that computes with DTensors.

        Parameters
        ----------
        case : runner.Case
        layout : CaseLayout
        grid : ProcessGrid

        Returns
        -------
        backends.ReferenceBackend
        """
        return _DTensorBackend(grid, layout, self.fails, self._mesh)

    def classify(
        self, reference: Refusal | None, outcomes: Sequence[RankOutcome], case: runner.Case
    ) -> tuple[Verdict, str]:
        """Classify the outcomes as for distconv, except for the errors that count as clear.

        Parameters
        ----------
        reference, outcomes, case
            As in :meth:`distconv.jobs.verification.engine.runner.CaseRun.classify`.

        Returns
        -------
        (Verdict, str)
        """
        return classify_refusals([outcome.refusal for outcome in outcomes]) or classify(reference, outcomes)


def classify_refusals(refused: Sequence[Refusal | None]) -> tuple[Verdict, str] | None:
    """Return the verdict on a sample, and its message, or None if no rank rejects it."""
    if not any(refused):
        return None
    kinds = {each and each.kind for each in refused}
    texts = "; ".join(dict.fromkeys("computes" if each is None else f"{each.kind}: {each.text}" for each in refused))
    if len(kinds) > 1:
        return Verdict.WRONG, f"ranks differ: {texts}"
    is_of_dtensor = any(word.lower() in texts.lower() for word in _DTENSOR_WORDS)
    return (Verdict.RAISES if is_of_dtensor else Verdict.UNCLEAR), texts

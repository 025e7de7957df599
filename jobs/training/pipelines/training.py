"""The trainer of pipelines, with the settings, learning rate and checkpoints of all trainings.

The jobs for images and point clouds use it for ``--pipeline`` and ``--pipeline-plan``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from distconv.communication.agreement import try_on_all_ranks
from distconv.data.loader import Batch
from distconv.errors import DistconvError
from distconv.grid import ProcessGrid
from distconv.jobs.training import settings as common
from distconv.jobs.training import training
from distconv.jobs.training.model_factory import ModelError
from distconv.jobs.training.training import T
from distconv.pipeline import Pipeline, SplitError, split
from distconv.pipeline.runtime.device_kinds import reorder_ranks
from distconv.pipeline.runtime.pipeline_plan import plan_entry
from distconv.placement import gather
from distconv.process import watchdog
from distconv.tensor import DistTensor

from .options import Pipelining

Cut = Callable[[int, Sequence[int]], list[str]]


class PipelineTrainer(training.Training):
    """A model in training as a pipeline. Collective: construct it on every rank.

    Every rank receives full mini-batches, of which its stage reads the part that it needs. ``optimizer`` is that of the
    full model; its state is filled for checkpoints alone. If stages have plans, the pipeline trains a distributed copy,
    and :meth:`synchronize` copies its weights to ``model``.

    Parameters
    ----------
    settings : TrainingSettings
    model : torch.nn.Module
        The model on ``device`` with the settings' dtype, the same on all ranks.
    cut : callable
        Returns the split points, given the samples of a micro-batch and the replicas of each part. Called only if
        ``pipelining`` has none.
    pipelining : Pipelining
        Schedule and stages.
    comm : mpi4py.MPI.Intracomm
    device : str
        Device of this rank.
    staged : callable
        Makes the stages from the parts of the model. By default the parts themselves. Parts of a sparse network become
        stages that exchange packed sparse tensors.
    example : torch.Tensor, optional
        Input of the model for ``distconv.pipeline.split``, which may require one.

    Raises
    ------
    DistconvError
        If the settings require gradient clipping, accumulation, a moving average of the weights, or another memory
        format than contiguous.
    SplitError
        On all ranks, if the model cannot be split.
    """

    def __init__(
        self,
        settings: common.TrainingSettings,
        model: torch.nn.Module,
        cut: Cut,
        pipelining: Pipelining,
        comm: MPI.Intracomm,
        *,
        device: str,
        staged: Callable[[list[torch.nn.Module]], list[torch.nn.Module]] = list,
        example: torch.Tensor | None = None,
    ) -> None:
        if settings.clip_norm is not None:
            raise DistconvError(
                "--clip-norm: cannot be combined with a pipeline, since no stage has the gradients of the "
                "others. Remove it."
            )
        if settings.accumulate > 1 or settings.ema is not None:
            raise DistconvError(
                "--accumulate, --ema: cannot be combined with a pipeline. Use --microbatches instead of --accumulate."
            )
        if settings.memory_format != "contiguous":
            raise DistconvError(
                f"--memory-format {settings.memory_format}: cannot be combined with a pipeline, whose stages exchange "
                "contiguous tensors. Remove it."
            )
        # Axis r: every rank receives the full mini-batch.
        super().__init__(settings, model, ProcessGrid(comm, r=comm.size), comm, device)
        self.pipelining, self.steps_in_flight = pipelining, pipelining.stages
        micro_batch = max(1, settings.batch // pipelining.microbatches)
        self.cuts: list[int] | list[str]
        """Split points (numbers of layers after which, or names of layers before which the model is split)."""
        if pipelining.ppv is not None:
            self.cuts = list(pipelining.ppv)
        elif pipelining.cuts is not None:
            self.cuts = list(pipelining.cuts)
        else:
            self.cuts = try_on_all_ranks(comm, lambda: cut(micro_batch, pipelining.part_replicas), SplitError)
        # Plans replace the parameters of stages by blocks. ``model`` keeps full ones, for evaluation and checkpoints.
        trained = model if pipelining.plans is None else copy.deepcopy(model)
        self.stages = try_on_all_ranks(comm, lambda: split(trained, self.cuts, example), SplitError)
        with reorder_ranks(comm, pipelining.kind, pipelining.kinds) as ranks:
            self.pipe = Pipeline(
                staged(self.stages),
                ranks,
                pipelining.schedule,
                self.loss,
                microbatches=pipelining.microbatches,
                replicas=pipelining.replicas,
                optimizer=lambda parameters: common.make_optimizer(settings, parameters),
                weights=pipelining.weights,
                batch_norm=pipelining.batch_norm,
                plans=pipelining.plans,
                **pipelining.options,
            )
        self._switched = False

    @property
    def distribution(self) -> str:
        """Schedule and stages, in words."""
        pipelining = self.pipelining
        split = "after layers" if pipelining.ppv is not None else "before"
        said = [
            f"{pipelining.schedule} of {pipelining.stages} stages"
            + (f" split {split} {_listed(self.cuts)}" if self.cuts else ""),
            f"{pipelining.microbatches} micro-batches" if pipelining.microbatches > 1 else "",
            f"replicas {_listed(pipelining.replicas)}" if max(pipelining.replicas) > 1 else "",
            f"plans {json.dumps(self._plans)}" if any(self._plans) else "",
            f"on {_listed(pipelining.kinds)}" if pipelining.kinds else "",
            f"no longer pipelined after step {pipelining.switch_after}" if pipelining.switch_after is not None else "",
        ]
        return ", ".join(filter(None, said))

    @property
    def placement(self) -> dict[str, Any]:
        """Pipeline and split points, as JSON values."""
        # Without ``kind``, which differs between ranks: a checkpoint has one placement for all of them.
        return {
            "pipeline": asdict(replace(self.pipelining, plans=None, kind=None))
            | {"cuts": self.cuts, "plans": self._plans}
        }

    @property
    def _plans(self) -> list[dict[str, Any] | None]:
        return [plan_entry(plan) for plan in self.pipelining.plans or ()]

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float | None:
        """Train with a mini-batch. Collective: call on every rank.

        Parameters
        ----------
        inputs, labels : torch.Tensor
            The full mini-batch, on every rank.

        Returns
        -------
        float or None
            The newest known loss. None if no loss is known yet.

        Raises
        ------
        DistconvError
            On all ranks, if a loss is not finite. The weights have been updated with its gradients already.
        PipelineError
            On the rank where a pass fails.
        """
        self.model.train()
        self._switch_in_time()
        # In the optimizer of the full model, too: metrics.jsonl and checkpoints have its learning rate.
        for optimizer in filter(None, (self.pipe.optimizer, self.optimizer)):
            self.schedule(optimizer)
        with self.autocast():
            loss = self.pipe.step(_local_batch(inputs), _local_batch(labels))
        self.step_count += 1
        self._record_losses()
        return loss

    def finish_steps(self) -> None:
        """Drain the pipeline. Collective.

        The next step fills it again.

        Warnings
        --------
        In asynchronous schedules a drain changes the results. Trainings with other ``--checkpoint-every`` therefore
        have other weights.
        """
        self.pipe.drain()
        self._record_losses()

    def _switch_in_time(self) -> None:
        after = self.pipelining.switch_after
        if after is not None and not self._switched and self.step_count >= after:
            self.pipe.switch("gpipe")
            self._switched = True
            self._record_losses()

    def _record_losses(self) -> None:
        for number, loss in self.pipe.losses[len(self.losses) :]:
            self.record_loss(number + 1, loss)

    # -- the full model -----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Finish the steps in flight and copy the trained weights of all stages to ``model``. Collective."""
        self.finish_steps()
        self.pipe.synchronize()
        if self.pipelining.plans is not None:
            for stage in self.stages:
                self.model.load_state_dict(stage.state_dict(), strict=False)

    @torch.no_grad()
    def outputs(self, batches: Iterator[Batch], compute: Callable[[Any], T]) -> Iterator[tuple[Batch, T]]:
        """Yield each batch with the result of ``compute`` for its inputs. Collective: advance it on every rank.

        Batches are assigned round-robin. Each is computed by one rank with the full model, so that results equal those
        of a single process.

        Parameters
        ----------
        batches, compute
            As in :meth:`distconv.jobs.training.training.Training.outputs`.

        Yields
        ------
        (Batch, T)
        """
        self.synchronize()
        self.model.eval()
        # Every rank reads every batch, since the loader is collective, and computes one of each ``comm.size``.
        while turn := list(islice(batches, self.comm.size)):
            mine = turn[self.comm.rank : self.comm.rank + 1]
            computed = try_on_all_ranks(self.comm, partial(_compute_own_batch, mine, compute), ModelError)
            yield from zip(turn, self.comm.allgather(computed), strict=False)

    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that this rank's stage trains, by their names in the full model."""
        mine = {p for group in self.pipe.optimizer.param_groups for p in group["params"]} if self.pipe.optimizer else ()
        return {name: p for stage in self.stages for name, p in stage.named_parameters() if p in mine}

    def start_saving(self, directory: str) -> None:
        """Start writing a checkpoint of the full model, from which any grid or pipeline can resume. Collective."""
        self.synchronize()
        names = dict(self.model.named_parameters())
        # Replicas of a stage have the same state, so one of them sends it.
        own = self.pipe.optimizer.state if self.pipe.optimizer is not None and self.pipe.replica == 0 else {}
        with watchdog.waiting(lambda: "collecting the optimizer state of all stages"):
            state = {name: _gather_state(own[p]) for name, p in self._trained_parameters().items() if p in own}
            states = self.comm.gather(state, root=0)
        self.optimizer.state.update({names[name]: state for each in states or [] for name, state in each.items()})
        super().start_saving(directory)
        self.optimizer.state.clear()  # the checkpoint has copies; each stage keeps only its own state

    def resume(self, directory: str, *, fallback: bool = False) -> bool:
        """Resume from the newest finished checkpoint of any grid or pipeline. Collective.

        Parameters
        ----------
        directory, fallback
            As in :meth:`distconv.jobs.training.recovery.Recoverable.resume`.

        Returns
        -------
        bool
            As in :meth:`distconv.jobs.training.recovery.Recoverable.resume`.
        """
        if not super().resume(directory, fallback=fallback):
            return False
        self._copy_to_stages()
        if self.pipe.optimizer is not None:
            whole = {
                name: self.optimizer.state[p] for name, p in self.model.named_parameters() if p in self.optimizer.state
            }
            mine = self._trained_parameters()
            self.pipe.optimizer.state.update({mine[name]: state for name, state in whole.items() if name in mine})
        self.optimizer.state.clear()
        self.pipe.minibatches = self.step_count  # random numbers continue as without the interruption
        return True

    def load_initial_weights(self, path: Path) -> None:
        """Load the weights of a file into the model and its stages. Collective."""
        super().load_initial_weights(path)
        self._copy_to_stages()

    def _copy_to_stages(self) -> None:
        """Copy the weights of ``model`` to stages with plans, which do not share its parameters."""
        if self.pipelining.plans is not None:
            for stage in self.stages:
                stage.load_state_dict(self.model.state_dict(), strict=False)

    def close(self) -> None:
        """Finish the steps in flight and free the MPI resources of the pipeline. Collective."""
        self.pipe.close()


def _gather_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer state of a parameter with full tensors. Collective if the tensors are distributed."""
    return {key: gather(value) if isinstance(value, DistTensor) else value for key, value in state.items()}


def _compute_own_batch(batches: Sequence[Batch], compute: Callable[[Any], T]) -> T | None:
    """Return the result for this rank's batch, or None if it has none in this round."""
    for batch in batches:
        return compute(_local_batch(batch.tensors[0]))
    return None


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _local_batch(batch: torch.Tensor) -> torch.Tensor:
    return batch.local if isinstance(batch, DistTensor) else batch

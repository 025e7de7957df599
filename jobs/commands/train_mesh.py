"""Train a network to find the cells of a mesh that are about to tangle.

Writes to the folder --out: metrics.jsonl (a line per step), checkpoints, summary.json, and result.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.mesh import baselines
from distconv.jobs.mesh.picture import MeshExample, draw
from distconv.jobs.mesh.recipe import CHANNELS
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.scores import PredictorScore, Threshold, format_table, gains, headline, score_predictor
from distconv.jobs.mesh.segmentation import MeshSettings, MeshTrainer
from distconv.jobs.training.job import Job, JobOutcome, train
from distconv.jobs.training.memory_format import add_memory_format_argument
from distconv.jobs.training.options import add_reading_arguments, add_training_arguments
from distconv.jobs.training.report import Metrics
from distconv.jobs.training.training import Training
from distconv.layers.models import MESH_MODELS
from distconv.placement import gather

EXAMPLES = """\
examples:
  distconv data mesh --size 128 --samples 48 --out mesh.h5
  distconv train mesh --data mesh.h5
  mpiexec -n 4 distconv train mesh --data mesh.h5 --grid n=2,h=2 --out runs/mesh --baselines
  mpiexec -n 4 distconv train mesh --data mesh.h5 --grid n=2,h=2 --out runs/mesh --resume
  mpiexec -n 4 distconv train mesh --data mesh.h5 --plan plan.json --out runs/planned
  mpiexec -n 4 distconv train mesh --data big.h5 --model mesh1k --width 64 --grid h=2,w=2 --batch 1
"""

SHOWN_CHANNEL = CHANNELS.index("minimum Jacobian")
SHOWN_SAMPLES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv train mesh``."""
    defaults = MeshSettings()
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="HDF5 file that distconv data mesh has written, or the same datasets in another format "
        "(docs/how-to/data-formats.md)",
    )
    add_reading_arguments(parser)
    parser.add_argument("--model", choices=MESH_MODELS, default=defaults.model, help="network (default: %(default)s)")
    add_training_arguments(parser, defaults, out="runs/mesh")
    add_memory_format_argument(parser)
    parser.add_argument("--baselines", action="store_true", help="score simple predictors on the same samples, too")
    parser.add_argument(
        "--no-augment", dest="augment", action="store_false", help="do not flip and transpose samples at random"
    )


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD."""
    return train(options, JOB)


def _samples(options: argparse.Namespace, comm: MPI.Intracomm) -> MeshSamples:
    if options.data is None:
        raise DataError("--data: missing. Make a file with: distconv data mesh --size 128 --samples 48 --out mesh.h5")
    return MeshSamples(options.data, comm, extrapolated=options.baselines, readers=options.readers)


@dataclass(frozen=True)
class MeshOutcome(JobOutcome):
    """Scores of the network on held-out samples."""

    positive_fraction: float
    verdicts: list[PredictorScore]
    """Scores of the baselines, if requested, then of the network; empty without held-out samples."""
    threshold: Threshold

    @property
    def results(self) -> dict[str, Any]:
        """F1 of the network and the baselines, and the gains of the network."""
        return {
            "positive_fraction": self.positive_fraction,
            "threshold": self.threshold.value,
            "f1": [asdict(verdict) for verdict in self.verdicts],
            "gains": gains(self.verdicts) if self.verdicts else {},
        }

    @property
    def title(self) -> str:
        """F1 of the network on held-out samples."""
        return f"held-out F1 {self.verdicts[-1].heldout:.3f}" if self.verdicts else ""

    def show(self, trainer: Training, metrics: Metrics) -> None:
        """Print the table, and write a line of metrics.jsonl for the network.

        Parameters
        ----------
        trainer, metrics
            As in :meth:`distconv.jobs.training.job.JobOutcome.show`.
        """
        for verdict in self.verdicts[-1:]:
            metrics.write(step=trainer.step_count, evaluation="heldout", f1=verdict.heldout, families=verdict.families)
            print(f"\n{headline(self.verdicts)}\n\n{format_table(self.verdicts)}\n")

    def draw(self, path: Path, examples: Sequence[MeshExample], title: str, metrics: Metrics) -> None:
        """Draw the examples, the losses, and precision over recall.

        Parameters
        ----------
        path, examples, title, metrics
            As in :meth:`distconv.jobs.training.job.JobOutcome.draw`.
        """
        draw(
            path,
            examples,
            channel=CHANNELS[SHOWN_CHANNEL],
            threshold=self.threshold.value,
            losses=metrics.losses(),
            verdicts=self.verdicts,
            title=title,
        )


class MeshJob(Job):
    """Training job of a segmentation model."""

    def announce(self, trainer: Any, resumed: bool) -> str:
        """Return the line printed before the first step, with the fraction of positive cells.

        Parameters
        ----------
        trainer, resumed
            As in :meth:`distconv.jobs.training.job.Job.announce`.

        Returns
        -------
        str
        """
        share = f"positive cells: {100 * trainer.samples.positive_fraction:.1f} % of the training samples"
        return f"{super().announce(trainer, resumed)}\n{share}"

    def evaluate(self, options: argparse.Namespace, trainer: Any, metrics: Metrics) -> MeshOutcome:
        """Return the scores of the network and, if requested, of the baselines, with the network's threshold.

        Parameters
        ----------
        options, trainer, metrics
            As in :meth:`distconv.jobs.training.job.Job.evaluate`.

        Returns
        -------
        MeshOutcome
        """
        samples = trainer.samples
        training = trainer.scores("train")
        threshold = training.best_threshold()
        if not samples.count("heldout"):
            return MeshOutcome(samples.positive_fraction, [], threshold)
        verdicts = []
        if options.baselines:
            q_star = float(samples.file("train").attribute("threshold") or 0.4)
            verdicts += baselines.constant_answers(samples)
            verdicts.append(baselines.best_channel(samples))
            verdicts += baselines.extrapolation(samples, q_star)
            verdicts.append(baselines.perceptron(samples, trainer.grid, trainer.settings))
        verdicts.append(score_predictor(trainer.settings.model, training, trainer.scores("heldout"), threshold))
        return MeshOutcome(samples.positive_fraction, verdicts, threshold)

    def examples(self, trainer: Any, outcome: Any) -> list[MeshExample]:
        """Return held-out samples of different families with the network's predictions. Collective.

        Parameters
        ----------
        trainer, outcome
            As in :meth:`distconv.jobs.training.job.Job.examples`.

        Returns
        -------
        list of MeshExample
        """
        if not outcome.verdicts:
            return []
        families = trainer.samples.families["heldout"]
        firsts = sorted(families.index(family) for family in set(families))
        others = [sample for sample in range(len(families)) if sample not in firsts]
        wanted = sorted((firsts + others)[:SHOWN_SAMPLES])
        examples = []
        for batch, probability in trainer.predictions("heldout"):
            rows = [row for row, sample in enumerate(batch.samples) if sample in wanted]
            if rows:
                channel, label = gather(batch.tensors[0][:, SHOWN_CHANNEL]), gather(batch.tensors[1])
                maps = [np.asarray(whole.cpu()) for whole in (channel, label, gather(probability))]
                examples += [MeshExample(families[batch.samples[row]], *(whole[row] for whole in maps)) for row in rows]
            if len(examples) == len(wanted):  # on all ranks after the same batch
                break
        return examples


JOB = MeshJob(
    settings=MeshSettings,
    samples=_samples,
    trainer=MeshTrainer,
    extents=lambda trainer: " x ".join(map(str, trainer.samples.size)),
)

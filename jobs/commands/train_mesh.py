"""Train a network to find the cells of a mesh that are about to tangle.

Writes to the folder --out: metrics.jsonl (one line per step), checkpoints, summary.json, and result.png.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.mesh import baselines
from distconv.jobs.mesh.picture import Example, draw
from distconv.jobs.mesh.recipe import CHANNELS
from distconv.jobs.mesh.samples import MeshSamples
from distconv.jobs.mesh.scores import Threshold, Verdict, gains, headline, judge, table
from distconv.jobs.mesh.segmentation import Settings, Trainer
from distconv.jobs.training.options import add_training_arguments, device_for, place_of, settings_of
from distconv.jobs.training.report import Metrics, announcement, conclude, picture, times
from distconv.jobs.training.run import prepare, take_steps
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
    """Options of ``distconv train mesh``."""
    defaults = Settings()
    parser.add_argument("--data", metavar="PATH", help="HDF5 file that `distconv data mesh` has made")
    parser.add_argument("--model", choices=MESH_MODELS, default=defaults.model, help="default: %(default)s")
    add_training_arguments(parser, defaults, out="runs/mesh")
    parser.add_argument("--baselines", action="store_true", help="judge simple predictors on the same samples too")
    parser.add_argument(
        "--no-augment", dest="augment", action="store_false", help="do not mirror and transpose samples at random"
    )


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    verdicts: list[Verdict]
    """What the network had to beat, if asked for, and the network last; none without held-out samples."""
    threshold: Threshold
    training_s: float
    total_s: float


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD.

    Raises
    ------
    DataError
        If ``--data`` is missing.
    """
    comm = MPI.COMM_WORLD
    if options.data is None:
        raise DataError(
            "train mesh needs --data PATH; make such a file with: "
            "distconv data mesh --size 128 --samples 48 --out mesh.h5"
        )
    place, device = place_of(options, comm), device_for(options.device, comm)
    begin = time.perf_counter()
    with closing(MeshSamples(options.data, comm, extrapolated=options.baselines)) as samples:
        trainer = Trainer(settings_of(options, Settings), samples, place, device)
        resumed = prepare(options, trainer)
        if comm.rank == 0:
            print(_announcement(trainer, resumed), flush=True)
        with Metrics(Path(options.out), trainer) as metrics:
            take_steps(options, trainer, metrics)
            training_s = time.perf_counter() - begin
            verdicts, threshold = _judge(options, trainer)
            _report(trainer, metrics, Outcome(verdicts, threshold, training_s, time.perf_counter() - begin))
    return 0


def _announcement(trainer: Trainer, resumed: bool) -> str:
    height, width = trainer.samples.size
    return (
        f"{announcement(trainer, f'{height} x {width}', resumed)}\n"
        f"positive cells: {100 * trainer.samples.positive_fraction:.1f} % of the training samples"
    )


def _judge(options: argparse.Namespace, trainer: Trainer) -> tuple[list[Verdict], Threshold]:
    """The network and, if asked for, what it has to beat; and the network's threshold."""
    samples = trainer.samples
    training = trainer.scores("train")
    threshold = training.best_threshold()
    if not samples.count("heldout"):
        return [], threshold
    verdicts = []
    if options.baselines:
        q_star = float(samples.train.attribute("threshold") or 0.4)  # type: ignore[arg-type]
        verdicts += baselines.constant_answers(samples)
        verdicts.append(baselines.best_channel(samples))
        verdicts += baselines.extrapolation(samples, q_star)
        verdicts.append(baselines.perceptron(samples, trainer.grid, trainer.settings))
    verdicts.append(judge(trainer.settings.model, training, trainer.scores("heldout"), threshold))
    return verdicts, threshold


def _report(trainer: Trainer, metrics: Metrics, outcome: Outcome) -> None:
    """Print, write summary.json and draw the picture, all on rank 0. Collective."""
    examples = _examples(trainer) if outcome.verdicts else []
    results = {
        "positive_fraction": trainer.samples.positive_fraction,
        "threshold": outcome.threshold.value,
        "f1": [asdict(verdict) for verdict in outcome.verdicts],
        "gains": gains(outcome.verdicts) if outcome.verdicts else {},
        "training_s": outcome.training_s,
        "total_s": outcome.total_s,
    }

    def show() -> None:
        for verdict in outcome.verdicts[-1:]:
            metrics.write(step=trainer.step_count, evaluation="heldout", f1=verdict.heldout, families=verdict.families)
        if outcome.verdicts:
            print(f"\n{headline(outcome.verdicts)}\n\n{table(outcome.verdicts)}\n")
        print(times(outcome.training_s, outcome.total_s))
        print(_picture(trainer, metrics, outcome, examples))

    conclude(trainer, metrics, results, show)


def _picture(trainer: Trainer, metrics: Metrics, outcome: Outcome, examples: list[Example]) -> str:
    """Draw the picture; a line that says where it is, or why there is none."""
    path = metrics.folder / "result.png"
    f1 = f", held-out F1 {outcome.verdicts[-1].heldout:.3f}" if outcome.verdicts else ""
    title = f"{trainer.settings.model} after {trainer.step_count} steps on {trainer.where}{f1}"
    channel, threshold = CHANNELS[SHOWN_CHANNEL], outcome.threshold.value
    return picture(
        path,
        lambda: draw(
            path,
            examples,
            channel=channel,
            threshold=threshold,
            losses=metrics.losses(),
            verdicts=outcome.verdicts,
            title=title,
        ),
    )


def _examples(trainer: Trainer) -> list[Example]:
    """Some held-out samples of different families with the network's prediction, on every rank. Collective."""
    families = trainer.samples.families["heldout"]
    firsts = sorted(families.index(family) for family in set(families))
    others = [sample for sample in range(len(families)) if sample not in firsts]
    wanted = sorted((firsts + others)[:SHOWN_SAMPLES])
    found = []
    for batch, probability in trainer.predictions("heldout"):
        rows = [row for row, sample in enumerate(batch.samples) if sample in wanted]
        if rows:
            channel, label = gather(batch.tensors[0][:, SHOWN_CHANNEL]), gather(batch.tensors[1])
            maps = [np.asarray(whole.cpu()) for whole in (channel, label, gather(probability))]
            found += [Example(families[batch.samples[row]], *(whole[row] for whole in maps)) for row in rows]
        if len(found) == len(wanted):
            break
    return found

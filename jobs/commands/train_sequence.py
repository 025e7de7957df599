"""Train a recurrent network to tell the classes of sequences: spoken words and other sounds, or embedded bitstreams.

Sounds come from an HDF5 file (audio, offset, label) or a folder (train/CLASS/*.wav, test/CLASS/*.wav) and are turned
into mel-frequency cepstral coefficients. Writes to the folder --out: metrics.jsonl (a line per step and per epoch's
accuracy on held-out sequences), checkpoints, summary.json, and result.png. The grid splits samples (n) and time (w);
neither it nor --method, the way back through time, changes more than the order of sums.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from distconv.errors import DataError, GridError
from distconv.grid import ProcessGrid
from distconv.jobs.sequence.bitstreams import Bitstreams, by_counting
from distconv.jobs.sequence.mfcc import Recipe
from distconv.jobs.sequence.picture import Example, draw
from distconv.jobs.sequence.samples import SequenceSamples
from distconv.jobs.sequence.trainer import LAYERS, Settings, Trainer
from distconv.jobs.training.options import (
    add_training_arguments,
    device_for,
    place_of,
    positive,
    positive_float,
    settings_of,
)
from distconv.jobs.training.outcome import Outcome, majority_vote, report, write_score
from distconv.jobs.training.report import Metrics, announcement
from distconv.jobs.training.run import prepare, take_steps
from distconv.jobs.training.score import Score
from distconv.layers.recurrent import Method

EXAMPLES = """\
examples:
  distconv train sequence
  distconv train sequence --data fsdd_8k.h5 --epochs 15 --out runs/digits
  mpiexec -n 2 distconv train sequence --model rnn --length 10000 --grid w=2 --method blelloch
  mpiexec -n 4 distconv train sequence --data sounds/ --grid n=2,w=2 --out runs/sounds --resume
"""

SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv train sequence``."""
    defaults = Settings()
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="HDF5 file or folder of sounds (default: embedded bitstreams)"
    )
    parser.add_argument("--model", choices=LAYERS, default=defaults.model, help="default: %(default)s")
    parser.add_argument(
        "--method",
        choices=[method.value for method in Method],
        default=Method.AUTO.value,
        help="the way back through time (default: %(default)s)",
    )
    parser.add_argument(
        "--length", type=positive, default=defaults.length, help="bits of a bitstream (default: %(default)s)"
    )
    parser.add_argument(
        "--coefficients", type=positive, default=defaults.coefficients, help="of a sound (default: %(default)s)"
    )
    parser.add_argument(
        "--hop-ms", type=positive_float, default=defaults.hop_ms, help="between its frames (default: %(default)s)"
    )
    add_training_arguments(parser, defaults, out="runs/sequence")


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD.

    Raises
    ------
    GridError
        If a plan is asked for.
    DataError
        If there are too few coefficients.
    """
    comm = MPI.COMM_WORLD
    options.grid = options.grid or _default_grid(comm.size, options.batch)
    place, device = place_of(options, comm), device_for(options.device, comm)
    if not isinstance(place, ProcessGrid):
        raise GridError("--plan: the layers of a recurrent network are all on one grid; give it with --grid")
    if options.coefficients < 2:
        raise DataError(f"--coefficients {options.coefficients}: the first is left out; ask for 2 or more")
    begin = time.perf_counter()
    recipe = Recipe(options.coefficients, hop_ms=options.hop_ms)
    samples = SequenceSamples(options.data, comm, length=options.length, recipe=recipe)
    trainer = Trainer(settings_of(options, Settings), samples, place, device, method=options.method)
    resumed = prepare(options, trainer)
    if comm.rank == 0:
        extents = f"{samples.channels} values a step, {samples.name}"
        print(announcement(trainer, extents, resumed), flush=True)
    with Metrics(Path(options.out), trainer) as metrics:
        take_steps(options, trainer, metrics, lambda: _after_epoch(trainer, metrics))
        training_s = time.perf_counter() - begin
        scores = {group: _evaluate(trainer, metrics, group) for group in samples.groups}
        baselines, total_s = _baselines(samples), time.perf_counter() - begin
        outcome = Outcome(scores=scores, baselines=baselines, training_s=training_s, total_s=total_s)
        _report(trainer, metrics, outcome, options.method)
    return 0


def _default_grid(ranks: int, batch: int) -> dict[str, int]:
    """Ranks along n as far as they divide the batch, the others along w."""
    along_n = math.gcd(ranks, batch)
    return {"n": along_n, "w": ranks // along_n}


def _after_epoch(trainer: Trainer, metrics: Metrics) -> None:
    if "test" in trainer.samples.groups:
        _evaluate(trainer, metrics, "test")


def _evaluate(trainer: Trainer, metrics: Metrics, group: str) -> Score:
    score = trainer.evaluate(group)
    write_score(trainer, metrics, group, score)
    return score


def _baselines(samples: SequenceSamples) -> dict[str, float]:
    """What the network has to beat on held-out sequences; of bitstreams, counting is what it can hope for."""
    groups = samples.groups
    if "test" not in groups:
        return {}
    found = {"majority vote": majority_vote(groups["train"].labels, groups["test"].labels)}
    if isinstance(groups["test"], Bitstreams):
        found["count of the bits"] = by_counting(groups["test"])
    return found


def _report(trainer: Trainer, metrics: Metrics, outcome: Outcome, method: str) -> None:
    """Print, write summary.json and draw the picture. Collective."""
    examples = _examples(trainer)
    more = {"method": method, "classes": trainer.samples.class_names, "baselines": outcome.baselines}
    report(
        trainer,
        metrics,
        outcome,
        more,
        no_test="no held-out sequences to test on",
        draw=lambda path, lines, title: draw(path, examples, lines, title),
    )


def _examples(trainer: Trainer) -> list[Example]:
    """Some sequences from all over the held-out ones, if there are any, with the classes found. Collective."""
    group = "test" if "test" in trainer.samples.groups else "train"
    sequences, names = trainer.samples.groups[group], trainer.samples.class_names
    shown = {int(place) for place in np.linspace(0, len(sequences.labels) - 1, SHOWN)}
    found = [
        (i, guess)
        for batch, logits in trainer.predictions(group)
        for i, guess in zip(batch.samples, logits.argmax(1).tolist(), strict=True)
        if i in shown
    ]
    return [Example(sequences[i], names[sequences.labels[i]], names[guess]) for i, guess in found]

"""Train a recurrent network to classify sequences: spoken words and other sounds, or embedded bitstreams.

Sounds come from an HDF5 file (audio, offset, label) or a folder (train/CLASS/*.wav, test/CLASS/*.wav). distconv
computes their mel-frequency cepstral coefficients. Writes to the folder --out: metrics.jsonl (a line per step and per
evaluation of the held-out sequences after an epoch), checkpoints, summary.json, and result.png. The grid splits samples
(n) and time (w). The grid and the backward algorithm (--method) change nothing but the order of floating-point sums.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from mpi4py import MPI

from distconv.errors import DataError
from distconv.jobs.sequence.bitstreams import Bitstreams, counting_accuracy
from distconv.jobs.sequence.mfcc import CoefficientRecipe
from distconv.jobs.sequence.picture import RESULT_FIGURE
from distconv.jobs.sequence.samples import SequenceSamples
from distconv.jobs.sequence.trainer import LAYERS, SequenceSettings, SequenceTrainer
from distconv.jobs.training.classifier import ClassifierJob, majority_vote
from distconv.jobs.training.job import train
from distconv.jobs.training.options import add_training_arguments, positive_float, positive_int
from distconv.layers.recurrent import Method

EXAMPLES = """\
examples:
  distconv train sequence
  distconv train sequence --data fsdd_8k.h5 --epochs 15 --out runs/digits
  mpiexec -n 2 distconv train sequence --model rnn --length 10000 --grid w=2 --method blelloch
  mpiexec -n 4 distconv train sequence --data sounds/ --grid n=2,w=2 --out runs/sounds --resume
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv train sequence``."""
    defaults = SequenceSettings()
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="HDF5 file or folder of sounds (default: embedded bitstreams)"
    )
    parser.add_argument(
        "--model", choices=LAYERS, default=defaults.model, help="recurrent layer (default: %(default)s)"
    )
    parser.add_argument(
        "--method",
        choices=[method.value for method in Method],
        default=Method.AUTO.value,
        help="backward algorithm of the recurrent layer (default: %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=positive_int,
        default=defaults.length,
        help="bits of each embedded bitstream (default: %(default)s)",
    )
    parser.add_argument(
        "--coefficients",
        type=positive_int,
        default=defaults.coefficients,
        help="mel-frequency cepstral coefficients of each frame of a sound (default: %(default)s)",
    )
    parser.add_argument(
        "--window-ms",
        type=positive_float,
        default=defaults.window_ms,
        help="length of a frame of a sound, in ms (default: %(default)s)",
    )
    parser.add_argument(
        "--hop-ms",
        type=positive_float,
        default=defaults.hop_ms,
        help="distance between the frames of a sound, in ms (default: %(default)s)",
    )
    parser.add_argument(
        "--stereo", action="store_true", help="compute coefficients of each audio channel (default: of their mean)"
    )
    add_training_arguments(parser, defaults, out="runs/sequence")


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD."""
    return train(options, JOB)


def _samples(options: argparse.Namespace, comm: MPI.Intracomm) -> SequenceSamples:
    if options.coefficients < 2:
        raise DataError(
            f"--coefficients {options.coefficients}: too few, since the first coefficient is not used. Use 2 or more."
        )
    recipe = CoefficientRecipe(options.coefficients, options.window_ms, options.hop_ms, options.stereo)
    return SequenceSamples(options.data, comm, length=options.length, recipe=recipe)


def _baselines(trainer: SequenceTrainer) -> dict[str, float]:
    """Return the accuracies of simpler predictors on held-out sequences; for bitstreams they include counting."""
    train, test = (trainer.samples.groups[group] for group in ("train", "test"))
    scores = {"majority vote": majority_vote(train.labels, test.labels)}
    if isinstance(test, Bitstreams):
        scores["count of the bits"] = counting_accuracy(test)
    return scores


JOB = ClassifierJob(
    settings=SequenceSettings,
    samples=_samples,
    trainer=SequenceTrainer,
    trainer_options=("method",),
    one_grid="recurrent network",
    rest_along="w",
    extents=lambda trainer: f"{trainer.samples.channels} values a step, {trainer.samples.name}",
    further_results=lambda options, samples: {"method": options.method, "classes": samples.class_names},
    baselines=_baselines,
    no_test_message="no held-out sequences to test on",
    picture=RESULT_FIGURE,
    # Spread over all samples, since neighboring samples may have the same class.
    shown_samples=lambda count: np.linspace(0, count - 1, 8).astype(int).tolist(),
    example_values=lambda samples, group, sample: samples.groups[group][sample],
)

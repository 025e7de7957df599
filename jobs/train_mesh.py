"""Train a network to find the cells of a mesh that are about to tangle.

Writes to the folder --out: metrics.jsonl (one line per step), checkpoints, summary.json, and result.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from mpi4py import MPI
from tqdm import tqdm

from distconv.agreement import together
from distconv.errors import DataError, GridError
from distconv.grid import ProcessGrid, parse_grid
from distconv.layers.models import MODELS
from distconv.tensor import gather

from . import mesh_baselines
from .mesh_picture import Example, draw
from .mesh_recipe import CHANNELS
from .mesh_samples import MeshSamples
from .mesh_training import Settings, Trainer
from .scores import Threshold, Verdict, judge, table

EXAMPLES = """\
examples:
  distconv data mesh --size 128 --samples 48 --out mesh.h5
  distconv train mesh --data mesh.h5
  mpiexec -n 4 distconv train mesh --data mesh.h5 --grid n=2,h=2 --out runs/mesh --baselines
  mpiexec -n 4 distconv train mesh --data mesh.h5 --grid n=2,h=2 --out runs/mesh --resume
  mpiexec -n 4 distconv train mesh --data big.h5 --model mesh1k --width 64 --grid h=2,w=2 --batch 1
"""

SHOWN_CHANNEL = CHANNELS.index("minimum Jacobian")
SHOWN_SAMPLES = 3
CHECKPOINTS = "checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv train mesh``."""
    defaults = Settings()
    parser.add_argument("--data", metavar="PATH", help="HDF5 file that `distconv data mesh` has made")
    parser.add_argument("--model", choices=sorted(MODELS), default=defaults.model, help="default: %(default)s")
    parser.add_argument("--width", type=positive, help="channels of the model (default: the model's own)")
    parser.add_argument("--grid", type=grid_extents, metavar="n=2,h=2", help="default: ranks along n, the rest along h")
    parser.add_argument(
        "--batch", type=positive, default=defaults.batch, help="samples per step (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=positive, default=defaults.epochs, help="default: %(default)s")
    parser.add_argument("--steps", type=positive, help="number of steps, in place of --epochs")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default=defaults.optimizer, help="default: %(default)s")
    parser.add_argument(
        "--lr", type=positive_float, default=defaults.lr, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument("--momentum", type=float, default=defaults.momentum, help="of sgd (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=defaults.weight_decay, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "float64"), default=defaults.dtype, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/mesh"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument(
        "--checkpoint-every", type=int, default=200, metavar="STEPS", help="0: never (default: %(default)s)"
    )
    parser.add_argument("--baselines", action="store_true", help="judge simple predictors on the same samples too")
    parser.add_argument("--no-augment", action="store_true", help="do not mirror samples at random")
    parser.add_argument("--drop-last", action="store_true", help="leave out an epoch's last batch if it is smaller")


def grid_extents(text: str) -> dict[str, int]:
    """A grid as it is written, ``n=2,h=2``."""
    try:
        return parse_grid(text)
    except GridError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def run(options: argparse.Namespace) -> int:
    """Train, evaluate, and write everything to ``options.out``. Collective over MPI.COMM_WORLD."""
    comm = MPI.COMM_WORLD
    if options.data is None:
        raise DataError(
            "train mesh needs --data PATH; make such a file with: "
            "distconv data mesh --size 128 --samples 48 --out mesh.h5"
        )
    grid = ProcessGrid(comm, **(options.grid or default_grid(comm.size, options.batch)))
    device = device_for(options.device, comm)
    begin = time.perf_counter()
    samples = MeshSamples(options.data, comm, extrapolated=options.baselines)
    trainer = Trainer(settings_of(options), samples, grid, device)
    resumed = _prepare(options, trainer)
    if comm.rank == 0:
        print(_announcement(trainer, resumed), flush=True)
    _train(options, trainer, Path(options.out))
    trained_s = time.perf_counter() - begin
    verdicts, threshold = _judge(options, trainer)
    _report(options, trainer, verdicts, threshold, trained_s, time.perf_counter() - begin)
    samples.close()
    return 0


def default_grid(ranks: int, batch: int) -> dict[str, int]:
    """Ranks along n as far as they divide the batch, the others along h."""
    along_n = math.gcd(ranks, batch)
    return {"n": along_n, "h": ranks // along_n}


def device_for(name: str, comm: MPI.Intracomm) -> str:
    """The device of this rank: ranks on a node take its GPUs in turn."""
    import torch

    def find() -> str:
        if name == "cuda":
            if not torch.cuda.is_available():
                raise GridError(f"--device {name}: this machine has no CUDA device; use --device cpu")
            node = comm.Split_type(MPI.COMM_TYPE_SHARED)
            name_here = f"cuda:{node.rank % torch.cuda.device_count()}"
            node.Free()
            return name_here
        return str(torch.device(name))

    return together(comm, find, GridError)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among the options."""
    return Settings(
        model=options.model,
        width=options.width,
        batch=options.batch,
        epochs=options.epochs,
        steps=options.steps,
        optimizer=options.optimizer,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        dtype=options.dtype,
        seed=options.seed,
        augment=not options.no_augment,
        drop_last=options.drop_last,
    )


def _prepare(options: argparse.Namespace, trainer: Trainer) -> bool:
    """Make the folder, resume if asked to; whether it did."""
    folder, comm = Path(options.out), trainer.grid.world
    together(comm, lambda: folder.mkdir(parents=True, exist_ok=True), DataError)
    if options.resume:
        if not trainer.resume(str(folder / CHECKPOINTS)):
            raise DataError(
                f"--resume: there is no finished checkpoint in {folder / CHECKPOINTS}; start without --resume"
            )
        return True
    # A new run must not take the older one's checkpoints for its own.
    together(comm, lambda: _put_aside(folder / CHECKPOINTS) if comm.rank == 0 else None, DataError)
    return False


def _put_aside(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        print(f"the checkpoints of an earlier run are now in {aside}")


def _announcement(trainer: Trainer, resumed: bool) -> str:
    height, width = trainer.samples.size
    parameters = sum(p.numel() for p in trainer.model.parameters())
    where = f"from step {trainer.step_count} on, " if resumed else ""
    return (
        f"{trainer.settings.model} ({parameters} parameters, {trainer.settings.dtype}) "
        f"on {trainer.samples.count('train')} samples of {height} x {width}, "
        f"batch {trainer.settings.batch}, {where}{trainer.steps} steps, "
        f"grid {trainer.grid.describe()} over {trainer.grid.size} ranks\n"
        f"positive cells: {100 * trainer.samples.positive_fraction:.1f} % of the training samples"
    )


def _train(options: argparse.Namespace, trainer: Trainer, folder: Path) -> None:
    comm = trainer.grid.world
    lines = together(comm, lambda: _metrics(folder, trainer.step_count) if comm.rank == 0 else None, DataError)
    every = options.checkpoint_every
    began = time.perf_counter()
    with tqdm(
        total=trainer.steps, initial=trainer.step_count, disable=comm.rank != 0, unit="step", mininterval=1.0
    ) as bar:
        for batch in trainer.batches():
            epoch = trainer.epoch
            loss = trainer.step(*batch.tensors)
            seconds, began = time.perf_counter() - began, time.perf_counter()
            rate = len(batch.samples) / seconds
            if lines is not None:
                _write_line(
                    lines,
                    step=trainer.step_count,
                    epoch=epoch,
                    loss=loss,
                    lr=trainer.optimizer.param_groups[0]["lr"],
                    seconds=round(seconds, 6),
                    samples_per_s=round(rate, 3),
                )
            bar.set_postfix_str(f"epoch {epoch}, loss {loss:.4f}", refresh=False)
            bar.update()
            if every and (trainer.step_count % every == 0 or trainer.step_count == trainer.steps):
                trainer.save(str(folder / CHECKPOINTS))
    if lines is not None:
        lines.close()


def _metrics(folder: Path, step: int) -> TextIO:
    """metrics.jsonl, open for more lines, with those up to ``step`` that an interrupted run left."""
    path = folder / "metrics.jsonl"
    kept = [json.dumps(line) + "\n" for line in _read_lines(path) if line.get("step", 0) <= step] if step else []
    stream = path.open("w", buffering=1)
    stream.writelines(kept)
    return stream


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # the run was killed while it wrote this line
            continue
        if isinstance(line, dict) and "loss" in line:
            yield line


def _write_line(stream: TextIO, **values: Any) -> None:
    stream.write(json.dumps(values) + "\n")


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
        verdicts += mesh_baselines.constant_answers(samples)
        verdicts.append(mesh_baselines.best_channel(samples))
        verdicts += mesh_baselines.extrapolation(samples, q_star)
        verdicts.append(mesh_baselines.perceptron(samples, trainer.grid, trainer.settings.batch, trainer.settings.seed))
    verdicts.append(judge(trainer.settings.model, training, trainer.scores("heldout"), threshold))
    return verdicts, threshold


def _report(
    options: argparse.Namespace,
    trainer: Trainer,
    verdicts: list[Verdict],
    threshold: Threshold,
    trained_s: float,
    total_s: float,
) -> None:
    comm = trainer.grid.world
    examples = _examples(trainer) if verdicts else []
    peaks = comm.gather(peak_memory_bytes(), root=0)

    def write() -> None:
        if peaks is None:
            return
        folder = Path(options.out)
        losses = [(line["step"], line["loss"]) for line in _read_lines(folder / "metrics.jsonl")]
        summary = {
            "settings": asdict(trainer.settings),
            "grid": trainer.grid.describe(),
            "ranks": comm.size,
            "steps": trainer.step_count,
            "final_loss": losses[-1][1] if losses else None,
            "positive_fraction": trainer.samples.positive_fraction,
            "threshold": threshold.value,
            "f1": [asdict(verdict) for verdict in verdicts],
            "training_s": trained_s,
            "total_s": total_s,
            "peak_memory_bytes": peaks,
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        with (folder / "metrics.jsonl").open("a") as stream:
            for verdict in verdicts[-1:]:
                _write_line(
                    stream, step=trainer.step_count, evaluation="heldout", f1=verdict.heldout, families=verdict.families
                )
        if verdicts:
            print(f"\n{table(verdicts)}\n")
        print(f"training took {trained_s:.1f} s, all of it {total_s:.1f} s")
        print(f"peak memory per rank: {', '.join(f'{peak / 2**20:.0f}' for peak in peaks)} MiB")
        print(_picture(folder, examples, threshold, losses, trainer, verdicts))

    together(comm, write, DataError)


def peak_memory_bytes() -> int:
    """Most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _picture(
    folder: Path,
    examples: list[Example],
    threshold: Threshold,
    losses: list[tuple[int, float]],
    trainer: Trainer,
    verdicts: list[Verdict],
) -> str:
    """Draw the picture; a line that says where it is, or why there is none."""
    path = folder / "result.png"
    f1 = f", held-out F1 {verdicts[-1].heldout:.3f}" if verdicts else ""
    title = f"{trainer.settings.model} after {trainer.step_count} steps over {trainer.grid.describe()}{f1}"
    try:
        draw(path, examples, CHANNELS[SHOWN_CHANNEL], threshold.value, losses, title)
    except ImportError:
        return "no picture: matplotlib is not installed; pip install 'distconv[plot]'"
    return f"picture: {os.fspath(path)}"


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

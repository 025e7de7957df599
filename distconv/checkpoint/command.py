"""``distconv checkpoint``: what a run's checkpoints hold, whether they are whole, and their weights for elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from mpi4py import MPI

from distconv import checkpoint
from distconv.checkpoint.manifest import finished, read
from distconv.communication.agreement import together
from distconv.errors import CheckpointError

EXAMPLES = """\
examples:
  distconv checkpoint info runs/first
  distconv checkpoint verify runs/first
  distconv checkpoint export runs/first --out weights.pt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``distconv checkpoint``."""
    parser.add_argument(
        "action",
        choices=("info", "verify", "export"),
        help="list what is there; read and verify all of it; write the newest model's state dict",
    )
    parser.add_argument("directory", type=Path, help="a run's --out, its folder of checkpoints, or one checkpoint")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of export; torch.load reads it")


def run(options: argparse.Namespace) -> int:
    """Do so on rank 0; 1 if a checkpoint is damaged. Collective over MPI.COMM_WORLD.

    Raises
    ------
    CheckpointError
        On all ranks, if there is none, or what is to be exported is damaged.
    """

    def act() -> int:
        if MPI.COMM_WORLD.rank:
            return 0
        folders = _folders(options.directory)
        if options.action == "export":
            return _export(folders[-1], options.out)
        return max([_tell(folder, verify=options.action == "verify") for folder in folders])

    return int(MPI.COMM_WORLD.bcast(together(MPI.COMM_WORLD, act, CheckpointError)))


def _folders(directory: Path) -> list[Path]:
    """Finished checkpoints in or below ``directory``, by step."""
    places = (directory, directory / "checkpoints")
    found = {step: folder for place in places for step, folder in finished(place).items()}
    if not found and (directory / "manifest.json").is_file():
        return [directory]
    if not found:
        raise CheckpointError(f"there is no finished checkpoint in {directory}")
    return [found[step] for step in sorted(found)]


def _tell(folder: Path, *, verify: bool) -> int:
    try:
        for line in _lines(folder, verify=verify):
            print(line)
    except CheckpointError as error:
        print(error)
        return 1
    return 0


def _lines(folder: Path, *, verify: bool) -> Iterator[str]:
    found = read(folder)
    nbytes = sum(entry["bytes"] for entry in found["files"].values())
    weights = [entry for name, entry in found["tensors"].items() if name.startswith("model/")]
    if verify:
        checkpoint.load(folder, MPI.COMM_SELF)
    yield (
        f"{folder}: step {found['step']}, {len(weights)} tensors of a model and {len(found['tensors']) - len(weights)} "
        f"more, {nbytes / 2**20:.1f} MiB in {len(found['files'])} files{', whole' if verify else ''}"
    )
    if not verify:
        for key, value in found["values"].items():
            yield f"  {key}: {value}"


def _export(folder: Path, out: Path | None) -> int:
    if out is None:
        raise CheckpointError("export needs --out FILE")
    tensors = checkpoint.load(folder, MPI.COMM_SELF).tensors
    state = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    torch.save(state, out)
    print(f"{out}: {len(state)} tensors of {folder}")
    return 0

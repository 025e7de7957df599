"""List, verify and export the checkpoints of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from distconv import checkpoint
from distconv.checkpoint.manifest import MANIFEST, commits, describe_missing, read
from distconv.checkpoint.optimizers import select_prefix
from distconv.checkpoint.state import EXTRA
from distconv.communication.agreement import try_on_rank_0
from distconv.errors import CheckpointError
from distconv.parameters.weight_files import write_weights

EXAMPLES = """\
examples:
  distconv checkpoint info runs/first
  distconv checkpoint verify runs/first
  distconv checkpoint export runs/first --out weights.pt
  distconv checkpoint export runs/first --out weights.safetensors
  distconv checkpoint export runs/first --out weights
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv checkpoint``."""
    parser.add_argument(
        "action",
        choices=("info", "verify", "export"),
        help="info lists the checkpoints, verify reads all of them and checks their data, export writes the state dict "
        "of the newest",
    )
    parser.add_argument(
        "directory", type=Path, help="output folder of a run, its folder of checkpoints, or one checkpoint"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE|FOLDER",
        help="file or folder that export writes: .pt for torch.load, .safetensors, or a name without a suffix for a "
        "folder of torch.distributed.checkpoint",
    )
    parser.add_argument(
        "--no-average",
        dest="average",
        action="store_false",
        help="export the weights of the last step, not their moving average",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command on rank 0. Collective over MPI.COMM_WORLD.

    Returns
    -------
    int
        The exit code: 1 if a checkpoint is damaged.

    Raises
    ------
    CheckpointError
        On all ranks, if there is no checkpoint, or the one to export is damaged.
    """

    def act() -> int:
        folders = _folders(options.directory)
        if options.action == "export":
            return _export(folders[-1], options.out, options.average)
        return max([_print_checkpoint(folder, verify=options.action == "verify") for folder in folders])

    return try_on_rank_0(MPI.COMM_WORLD, act, CheckpointError)


def _folders(directory: Path) -> list[Path]:
    """Return the finished checkpoints in or below ``directory``, the last commit at the end."""
    places = (directory, directory / "checkpoints")
    folders = [each.folder for place in places for each in commits(place)]
    if not folders and (directory / MANIFEST).is_file():
        return [directory]
    if not folders:
        raise CheckpointError(describe_missing(places[1] if places[1].is_dir() else directory))
    return folders


def _print_checkpoint(folder: Path, *, verify: bool) -> int:
    """Print the description of a checkpoint, or its error; return 1 if it is damaged."""
    try:
        for line in _describe_checkpoint(folder, verify=verify):
            print(line)
    except CheckpointError as error:
        print(error)
        return 1
    return 0


def _describe_checkpoint(folder: Path, *, verify: bool) -> Iterator[str]:
    manifest = read(folder)
    nbytes = sum(entry["bytes"] for entry in manifest["files"].values())
    weights = [entry for name, entry in manifest["tensors"].items() if name.startswith("model/")]
    if verify:
        # A complete load, which verifies every file.
        checkpoint.load(folder, MPI.COMM_SELF)
    yield (
        f"{folder}: step {manifest['step']}, {len(weights)} tensors of a model and "
        f"{len(manifest['tensors']) - len(weights)} more, {nbytes / 2**20:.1f} MiB in "
        f"{len(manifest['files'])} files{', intact' if verify else ''}"
    )
    if not verify:
        for key, value in manifest["values"].items():
            yield f"  {_printable(key)}: {_printable(str(value))}"


def _export(folder: Path, out: Path | None, average: bool) -> int:
    if out is None:
        raise CheckpointError("distconv checkpoint export: --out is missing. Pass --out FILE.")
    loaded = checkpoint.load(folder, MPI.COMM_SELF)
    whose = checkpoint.with_average(loaded) if average else loaded
    state = {**select_prefix("model/", whose.tensors), **loaded.values.get(EXTRA, {})}
    write_weights(state, out)
    kept = any(name.startswith("average/") for name in loaded.tensors)
    print(f"{out}: {len(state)} tensors of {folder}{', averaged' if average and kept else ''}")
    return 0


def _printable(text: str) -> str:
    """Return ``text``, which may come from anyone, with escapes for characters that control a terminal."""
    return text if text.isprintable() else ascii(text)

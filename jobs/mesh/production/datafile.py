"""Assembly of the data set file from finished runs.

:func:`distconv.jobs.mesh.dataset.generate` calls it on rank 0. The module does not communicate.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import h5py
import numpy as np

from distconv.errors import DataError
from distconv.jobs.mesh.hydro.initial_conditions import CELLS_PER_UNIT, FAMILIES
from distconv.jobs.mesh.recipe import CHANNELS, VERSION, MeshRecipe, Summary
from distconv.whole_files import atomic_path

from .parts import SPLITS, FlowRun, RunFolder, RunStream, write_atomically

__all__ = ["assemble"]

# Up to this size the file is assembled in memory: if the disk is full, HDF5 terminates by a signal, while a plain write
# raises an error.
IMAGE_BYTES = 1 << 30

Chosen = list[tuple[FlowRun, int]]


def assemble(target: Path, recipe: MeshRecipe, parts: RunFolder, streams_needed: list[RunStream]) -> Summary:
    """Write the data set file from finished runs, and remove the folder of runs.

    The file appears under its name only when it is complete.

    Parameters
    ----------
    target : Path
        The file to write.
    recipe : MeshRecipe
        The data set.
    parts : RunFolder
        The finished runs.
    streams_needed : list of RunStream
        The streams of the data set.

    Returns
    -------
    Summary
        Summary of the file.

    Raises
    ------
    DataError
        If the file of a run is damaged, or the file cannot be written.
    """
    chosen = [
        alternate_families(parts, [stream for stream in streams_needed if stream.split == split])
        for split in range(len(SPLITS))
    ]
    summary = summarise(target, recipe, parts, streams_needed, chosen)
    needed = recipe.size**2 * (4 * len(CHANNELS) + 5) * (recipe.samples + recipe.heldout)
    if needed <= IMAGE_BYTES:
        with h5py.File(target.name, "w", driver="core", backing_store=False) as file:
            write_datasets(file, recipe, parts, chosen, summary)
            file.flush()
            image = file.id.get_file_image()
        write_atomically(target, image)
    else:
        write_large(target, needed, lambda file: write_datasets(file, recipe, parts, chosen, summary))
    shutil.rmtree(parts.folder, ignore_errors=True)  # only now: until the file is complete, a new call resumes from it
    return summary


def alternate_families(parts: RunFolder, streams_needed: list[RunStream]) -> Chosen:
    """Return the samples of a split as (run, number in the run), alternating between the families.

    Parameters
    ----------
    parts : RunFolder
        Finished runs.
    streams_needed : list of RunStream
        Streams of the split.

    Returns
    -------
    Chosen
    """
    each = [[(run, n) for run, taken in parts.used_runs(stream) for n in taken] for stream in streams_needed]
    return [sample for samples in zip_longest(*each) for sample in samples if sample is not None]


def summarise(
    target: Path, recipe: MeshRecipe, parts: RunFolder, streams_needed: list[RunStream], chosen: list[Chosen]
) -> Summary:
    """Return the summary of the file, with the numbers of rejected snapshots.

    Parameters
    ----------
    target, recipe, parts, streams_needed
        As in :func:`assemble`.
    chosen : list
        The samples of each split, as :func:`alternate_families` returns them.

    Returns
    -------
    Summary
        Without ``seconds``.
    """
    runs = [parts.outline(run).counters for stream in streams_needed for run, _ in parts.used_runs(stream)]
    facts = [[parts.outline(run).samples[n] for run, n in split] for split in chosen]
    positives = [[sample["positives"] for sample in split] for split in facts]
    rejected = {
        "degraded already": sum(run["degraded"] for run in runs),
        "too quiet": sum(run["quiet"] for run in runs),
        "cut off by the end of the run": sum(run["unfinished"] for run in runs),
    }
    accepted = sum(parts.accepted(run) or 0 for stream in streams_needed for run, _ in parts.used_runs(stream))
    candidates = sum(rejected.values()) + accepted
    return Summary(
        path=str(target),
        size=recipe.size,
        samples=recipe.samples,
        heldout=recipe.heldout,
        runs=len(runs),
        candidates=candidates,
        rejection_rate=sum(rejected.values()) / candidates,
        rejected=rejected,
        inversions=sum(sample["inversions"] for split in facts for sample in split),
        positive_fraction=float(np.mean(positives[0] + positives[1])),
        positive_fraction_train=float(np.mean(positives[0])),
        positive_fraction_heldout=float(np.mean(positives[1])) if positives[1] else 0.0,
        steps=sum(run["steps"] for run in runs),
    )


def write_datasets(
    file: h5py.File, recipe: MeshRecipe, parts: RunFolder, chosen: list[Chosen], summary: Summary
) -> None:
    """Write all attributes and datasets.

    Parameters
    ----------
    file : h5py.File
    recipe : MeshRecipe
    parts : RunFolder
        Finished runs.
    chosen : list of Chosen
        Samples of each split.
    summary : Summary
    """
    # Neither the path, which may change, nor the time, so that the same data set has the same content.
    kept = {key: value for key, value in asdict(summary).items() if key not in ("path", "seconds")}
    file.attrs["recipe"] = json.dumps(asdict(recipe))
    file.attrs["summary"] = json.dumps(kept)
    file.attrs["version"] = VERSION
    file.attrs["channels"] = list(CHANNELS)
    file.attrs["families"] = list(FAMILIES)
    file.attrs["tau"] = recipe.tau
    file.attrs["threshold"] = recipe.threshold
    file.attrs["cell_size"] = 1.0 / CELLS_PER_UNIT
    for key in ("rejection_rate", "inversions", "positive_fraction"):
        file.attrs[key] = kept[key]
    for name, split in zip(SPLITS, chosen, strict=True):
        group = file.create_group(name)
        group.attrs["positive_fraction"] = kept[f"positive_fraction_{name}"]
        write_group(group, recipe, parts, split)


def write_group(group: h5py.Group, recipe: MeshRecipe, parts: RunFolder, chosen: Chosen) -> None:
    """Write the samples of one split to its group.

    Parameters
    ----------
    group : h5py.Group
        ``train`` or ``heldout``.
    recipe : MeshRecipe
    parts : RunFolder
        Finished runs.
    chosen : Chosen
        Samples of the split.
    """
    count, side = len(chosen), recipe.size
    tile = min(64, max(8, side // 4))
    arrays = {
        "input": ((count, len(CHANNELS), side, side), (1, len(CHANNELS), tile, tile), np.float32),
        "label": ((count, side, side), (1, tile, tile), np.uint8),
        "extrapolated": ((count, side, side), (1, tile, tile), np.float32),
    }
    for name, (shape, chunks, dtype) in arrays.items():
        # An empty dataset cannot have chunks.
        group.create_dataset(name, shape, dtype, chunks=chunks if count else None, fletcher32=count > 0)
    facts: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {
        "family": np.zeros(count, "S16"),
        "seed": np.full(count, recipe.seed, np.int64),
        "run": np.zeros(count, np.int64),
        "t": np.zeros(count),
        "step": np.zeros(count, np.int64),
        "positives": np.zeros(count),
        "inversions": np.zeros(count, np.int64),
    }
    for row, (run, number) in enumerate(chosen):
        sample = parts.sample(run, number)
        group["input"][row] = sample.channels
        group["label"][row] = sample.label
        group["extrapolated"][row] = sample.extrapolated
        facts["family"][row] = list(FAMILIES)[run.family].encode()
        facts["run"][row] = run.number
        facts["t"][row] = sample.time
        facts["step"][row] = sample.step
        facts["positives"][row] = sample.positives
        facts["inversions"][row] = sample.inversions
    for name, values in facts.items():
        group.create_dataset(name, data=values)


def write_large(target: Path, needed: int, write: Callable[[h5py.File], None]) -> None:
    """Write a file that does not fit into memory: under a temporary name, to disk, then rename it.

    Parameters
    ----------
    target : Path
        The file.
    needed : int
        Size of the file in bytes.
    write : callable
        Called with the open HDF5 file.

    Raises
    ------
    DataError
        If the disk has too little free space, which is checked first, or writing fails.
    """
    free = shutil.disk_usage(target.parent).free
    if free < 1.05 * needed:
        raise DataError(f"{target}: needs {needed / 1e9:.1f} GB on a disk with {free / 1e9:.1f} GB free")
    try:
        with atomic_path(target) as unfinished, h5py.File(unfinished, "x") as file:
            write(file)
    except OSError as error:
        raise DataError(f"{target}: cannot write {needed:,} bytes: {error}") from error

"""The mesh-tangling data set: its layout, its generation over ranks, and mirror images and transposes of samples.

A file has the groups ``train`` and ``heldout``, whose samples come from different runs::

    input         (N, 18, H, W) float32   the channels, named in CHANNELS and defined in production.channels
    label         (N, H, W) uint8         1 where the cell's smallest scaled corner Jacobian falls below the threshold
                                          at any time in [t, t + tau]
    extrapolated  (N, H, W) float32       smallest Jacobian over the same time if all nodes kept their velocity
    family, seed, run, t, step, positives, inversions  (N,)

Chunks are tiles of at most 64 x 64 cells, no larger than the block of a rank when four share a side, with checksums.
The attributes of the file say how it was made and what share of it is labelled.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from distconv.data.opened_file import open_hdf5
from distconv.errors import DataError
from distconv.text_files import load
from distconv.whole_files import PARTIAL

from .recipe import CHANNELS, TAU, VERSION, MeshRecipe, Summary

if TYPE_CHECKING:
    from mpi4py import MPI

    from distconv.jobs.mesh.production.cost import StepCost
    from distconv.jobs.mesh.production.run import LabelledSnapshot

__all__ = ["CHANNELS", "VERSION", "MeshRecipe", "Summary", "flip", "generate", "step_cost", "transpose"]

Array = TypeVar("Array", bound=npt.NDArray[Any])


def flip(channels: Array, label: Array, axis: str) -> tuple[Array, Array]:
    """Mirror image of a sample: its channels (..., 18, H, W) and label (..., H, W), reversed along ``axis`` "h" or "w".

    The velocity across the mirror, the vorticity and the skew change sign.

    Raises
    ------
    ValueError
        If ``axis`` is neither.
    """
    if axis not in ("h", "w"):
        raise ValueError(f"flip along {axis!r}: an image has the axes 'h' and 'w'")
    dimension = -2 if axis == "h" else -1
    mirrored = np.flip(channels, dimension).copy()
    for name in ("velocity v" if axis == "h" else "velocity u", "vorticity", "skew"):
        mirrored[..., CHANNELS.index(name), :, :] *= -1
    return mirrored, np.flip(label, dimension).copy()


def transpose(channels: Array, label: Array) -> tuple[Array, Array]:
    """Mirror image of a sample in the diagonal: the rows of its channels (..., 18, H, W) and label become columns.

    The velocities change places; the vorticity and the log aspect ratio change sign.
    """
    turned = np.swapaxes(channels, -1, -2).copy()
    u, v = CHANNELS.index("velocity u"), CHANNELS.index("velocity v")
    turned[..., [u, v], :, :] = turned[..., [v, u], :, :]
    for name in ("vorticity", "log aspect ratio"):
        turned[..., CHANNELS.index(name), :, :] *= -1
    return turned, np.swapaxes(label, -1, -2).copy()


def generate(
    path: str | os.PathLike[str],
    *,
    size: int,
    samples: int,
    heldout: int | None = None,
    tau: float = TAU,
    threshold: float = 0.4,
    seed: int = 0,
    comm: MPI.Comm | None = None,
    progress: bool = True,
    on_first_sample: Callable[[str, LabelledSnapshot], None] | None = None,
) -> Summary:
    """Generate a data set file, on all ranks of ``comm`` together; the content does not depend on their number.

    ``samples`` are for training, ``heldout`` more (default: a third as many) come from other runs. The ranks need a
    common file system. Finished runs are kept in the folder ``<path>.parts`` until the file is complete; called again
    after an interruption, generation goes on from there. A file that already holds this data set is left as it is.
    Rank 0 passes the family and the sample of its first run to ``on_first_sample``, long before the file is complete.

    Raises
    ------
    DataError
        On all ranks, if an argument makes no sense, the file exists with other content, or the file system refuses.
    """
    from distconv.jobs.mesh.production.datafile import assemble
    from distconv.jobs.mesh.production.parts import RunFolder, streams
    from distconv.jobs.mesh.production.production import collectively, produce
    from distconv.jobs.mesh.production.run import Criteria

    start = time.perf_counter()
    recipe = MeshRecipe(
        size, samples, samples // 3 if heldout is None else heldout, tau=tau, threshold=threshold, seed=seed
    )
    target = Path(path)
    there = collectively(comm, lambda: existing(target, recipe))
    if there is not None:
        return there
    session = collectively(comm, lambda: prepare(target, recipe))
    criteria = Criteria(tau=tau, threshold=threshold)
    parts = RunFolder(parts_folder(target), session, criteria.per_run)
    wanted = streams(recipe.samples, recipe.heldout)
    produce(
        parts,
        wanted,
        size=size,
        seed=seed,
        criteria=criteria,
        comm=comm,
        progress=progress,
        on_first_sample=on_first_sample,
    )
    summary = collectively(comm, lambda: assemble(target, recipe, parts, wanted))
    return replace(summary, seconds=time.perf_counter() - start)


def step_cost(size: int, steps: int) -> StepCost:
    """What a run of ``size`` x ``size`` cells costs, measured over ``steps`` steps; ``str()`` of it is a report."""
    from distconv.jobs.mesh.production.cost import step_cost as measure

    return measure(size, steps)


def parts_folder(target: Path) -> Path:
    """Where the finished runs of a data set are kept until it is complete."""
    return target.with_name(target.name + ".parts")


def existing(target: Path, recipe: MeshRecipe) -> Summary | None:
    """Summary of the file if it is there and holds this very data set; None if there is no file.

    Raises
    ------
    DataError
        If there is something else.
    """
    if not target.exists():
        return None
    try:
        with open_hdf5(target)[0] as file:
            stored = json.loads(file.attrs["recipe"])
            summary = json.loads(file.attrs["summary"])
    except (OSError, KeyError, ValueError):
        stored = None
    if stored != asdict(recipe):
        raise DataError(f"{target}: exists and is not the data set asked for; remove it or choose another name")
    return Summary(path=str(target), **summary)


def prepare(target: Path, recipe: MeshRecipe) -> str:
    """Make the folder of parts ready and return the mark of this session's claims. On rank 0.

    Raises
    ------
    DataError
        If the folder cannot be written to, or holds the runs of another data set.
    """
    from distconv.jobs.mesh.production.parts import write_atomically

    folder = parts_folder(target)
    note = folder / "recipe.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            write_atomically(note, json.dumps(recipe.of_a_run()).encode())
        noted = load(note, dict[str, Any], "recipe", DataError)
        for claim in (*folder.glob("*.claim-*"), *folder.glob("alarm-*"), *folder.glob(f"*{PARTIAL}")):
            claim.unlink(missing_ok=True)
    except (OSError, ValueError) as refusal:
        raise DataError(f"{folder}: cannot be used for the runs of {target.name}: {refusal}") from refusal
    for key, value in recipe.of_a_run().items():
        if noted.get(key) != value:
            raise DataError(
                f"{folder}: holds runs with {key} = {noted.get(key)} where {value} is asked for; "
                f"remove it or choose another name"
            )
    return secrets.token_hex(4)

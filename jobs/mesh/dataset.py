"""The mesh-tangling data set: file layout, generation, flips and transposes of samples.

A file has the groups ``train`` and ``heldout``, whose samples come from different runs::

    input         (N, 18, H, W) float32   channels, named in CHANNELS and defined in production.channels
    label         (N, H, W) uint8         1 where the cell's smallest scaled corner Jacobian falls below the threshold
                                          at any time in [t, t + tau]
    extrapolated  (N, H, W) float32       smallest Jacobian over the same time if all nodes kept their velocity
    family, seed     (N,)                 family of flow; seed of the data set
    run, t, step     (N,)                 number of the sample's run; time and step of the sample in it
    positives        (N,)                 fraction of labelled cells
    inversions       (N,)                 number of cells whose smallest Jacobian in [t, t + tau] is not positive

Chunks are tiles of 8 x 8 to 64 x 64 cells with checksums. From 32 cells per side on, they are no larger than the block
of a rank when each side is split four ways. Attributes of the file store the recipe and the fraction of labelled cells.
The solver is imported only when data are generated, since it requires numba.
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
    """Return a sample flipped along one axis.

    The velocity across the mirror line, the vorticity and the skew change sign.

    Parameters
    ----------
    channels : ndarray
        Channels (..., 18, H, W).
    label : ndarray
        Label (..., H, W).
    axis : str
        ``"h"`` or ``"w"``.

    Returns
    -------
    channels, label : ndarray
        Copies of the same shapes.

    Raises
    ------
    ValueError
        If ``axis`` is not valid.
    """
    if axis not in ("h", "w"):
        raise ValueError(f"flip: the axis is {axis!r}, but an image has the axes 'h' and 'w'")
    dimension = -2 if axis == "h" else -1
    # Copies: torch does not accept the negative strides of a flipped view.
    mirrored = np.flip(channels, dimension).copy()
    # Components across the mirror and signed rotations change their sign; all other channels are scalars.
    for name in ("velocity v" if axis == "h" else "velocity u", "vorticity", "skew"):
        mirrored[..., CHANNELS.index(name), :, :] *= -1
    return mirrored, np.flip(label, dimension).copy()


def transpose(channels: Array, label: Array) -> tuple[Array, Array]:
    """Return a sample with H and W exchanged.

    The two velocity channels are exchanged. The vorticity and the log aspect ratio change sign.

    Parameters
    ----------
    channels : ndarray
        Channels (..., 18, H, W).
    label : ndarray
        Label (..., H, W).

    Returns
    -------
    channels, label : ndarray
        Copies (..., 18, W, H) and (..., W, H).
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
    """Generate a data set file. Collective: call on every rank.

    The content does not depend on the number of ranks. The ranks need a common file system. Finished runs are kept in
    the folder ``<path>.parts`` until the file is complete; a call after an interruption resumes from there. A file that
    already contains this data set is left unchanged.

    Parameters
    ----------
    path : path-like
        The file to write.
    size : int
        Number of cells along each side, at least 16.
    samples : int
        Number of training samples.
    heldout : int, optional
        Number of held-out samples, by default a third of ``samples``. They come from other runs.
    tau : float
        Time horizon of the labels, in units of the solver.
    threshold : float
        Scaled corner Jacobian below which a cell is labelled, between 0 and 1.
    seed : int
        Seed of the data set.
    comm : MPI.Comm, optional
        The ranks that take part; None for this process alone.
    progress : bool
        If True, rank 0 shows a progress bar.
    on_first_sample : callable, optional
        Called on rank 0 with the family and a sample of its first run, long before the file is complete.

    Returns
    -------
    Summary
        Summary of the file, identical on all ranks but for ``seconds``.

    Raises
    ------
    DataError
        On all ranks, if an argument is invalid, the file exists with other content, or writing fails.
    """
    from distconv.jobs.mesh.production.datafile import assemble
    from distconv.jobs.mesh.production.parts import RunFolder, streams
    from distconv.jobs.mesh.production.production import call_on_rank_0, produce
    from distconv.jobs.mesh.production.run import Criteria

    start = time.perf_counter()
    recipe = MeshRecipe(
        size, samples, samples // 3 if heldout is None else heldout, tau=tau, threshold=threshold, seed=seed
    )
    target = Path(path)
    # Rank 0 alone looks at files, since another rank could see a file appear between two checks.
    there = call_on_rank_0(comm, lambda: existing_summary(target, recipe))
    if there is not None:
        return there
    session = call_on_rank_0(comm, lambda: prepare_parts(target, recipe))
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
    summary = call_on_rank_0(comm, lambda: assemble(target, recipe, parts, wanted))
    return replace(summary, seconds=time.perf_counter() - start)


def step_cost(size: int, steps: int) -> StepCost:
    """Return the measured cost of a run of ``size`` x ``size`` cells. Its ``str()`` is a report.

    Parameters
    ----------
    size : int
        Number of cells along each side.
    steps : int
        Number of steps to measure.

    Returns
    -------
    StepCost
        As :func:`distconv.jobs.mesh.production.cost.step_cost` returns it.
    """
    from distconv.jobs.mesh.production.cost import step_cost as measure

    return measure(size, steps)


def parts_folder(target: Path) -> Path:
    """Return the folder in which finished runs of a data set are kept until the file is complete."""
    return target.with_name(target.name + ".parts")


def existing_summary(target: Path, recipe: MeshRecipe) -> Summary | None:
    """Return the summary of the file if it contains this data set; None if there is no file. Local.

    Parameters
    ----------
    target : pathlib.Path
        File.
    recipe : MeshRecipe
        Recipe of the data set.

    Returns
    -------
    Summary or None

    Raises
    ------
    DataError
        If the file contains something else.
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
        raise DataError(f"{target}: exists with different options. Remove it or choose another name.")
    return Summary(path=str(target), **summary)


def prepare_parts(target: Path, recipe: MeshRecipe) -> str:
    """Create or check the folder of finished runs, and return a new session identifier. Call on rank 0.

    Claims of earlier sessions and incomplete files are removed.

    Parameters
    ----------
    target : Path
        The data set file.
    recipe : MeshRecipe
        The data set.

    Returns
    -------
    str
        The session identifier, which marks the claims of this call of :func:`generate`.

    Raises
    ------
    DataError
        If the folder is not writable, or contains runs of another data set.
    """
    from distconv.jobs.mesh.production.parts import write_atomically

    folder = parts_folder(target)
    note = folder / "recipe.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            write_atomically(note, json.dumps(recipe.of_a_run()).encode())
        noted = load(note, dict[str, Any], "recipe", DataError)
        # Claims and partial files of a killed job would keep their runs from being simulated again.
        for claim in (*folder.glob("*.claim-*"), *folder.glob("alarm-*"), *folder.glob(f"*{PARTIAL}")):
            claim.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot hold the simulations of {target.name}: {error}") from error
    for key, value in recipe.of_a_run().items():
        if noted.get(key) != value:
            raise DataError(
                f"{folder}: holds simulations with {key} = {noted.get(key)}, but {value} is requested. Remove it "
                "or choose another name."
            )
    return secrets.token_hex(4)

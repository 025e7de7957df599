"""Checkpoints: named global tensors in HDF5 and everything else in JSON; no pickle, so reading one runs no code.

::

    directory/step-000123/state-<digest>.h5    tensors, or pieces of them: image -> write -> fsync -> rename
    directory/step-000123/manifest.json        names, checksums, position; written last: it is the commit mark

    command       ``distconv checkpoint``: what a run's checkpoints hold, and their weights for elsewhere
    files         Files of tensors: HDF5 laid out in memory, and checksums
    lock          One job at a time writes to a folder of checkpoints
    manifest      Manifests: what a checkpoint consists of, that it was finished, and behind which others
    optimizers    State of an optimizer by the names of its parameters
    pieces        Pieces of tensors in files: whether they cover their tensor, and the part of each that a rank needs
    reading       Reading of checkpoints: every rank what it needs, every file verified, and every tensor whole
    schema        What the manifest of a checkpoint must be
    state         A module, its optimizer and the random number generators as named tensors and plain values
    values        Plain values on their way to JSON and back
    verification  Whether a checkpoint's files are there, and what they were when it was committed
    writing       Writing of checkpoints: each rank its pieces, and when all are on the disk the commit mark

A step without a manifest was never finished and does not count. A new manifest replaces an old one in one rename, so
at no moment is a finished step lost. The order of the commits, not step or clock, says which is the newest. Every
tensor is listed with the file and the global box of each of its pieces, so that any grid reads what any other wrote.
"""

from distconv.checkpoint.manifest import newest
from distconv.checkpoint.reading import Checkpoint, Contents, compare, load, load_newest
from distconv.checkpoint.state import (
    Loaded,
    averaged,
    capture,
    capture_average,
    check_fits,
    layouts_of,
    load_checkpoint,
    restore,
    restore_average,
    save_checkpoint,
)
from distconv.checkpoint.writing import Saving, save

__all__ = [
    "Checkpoint",
    "Contents",
    "Loaded",
    "Saving",
    "averaged",
    "capture",
    "capture_average",
    "check_fits",
    "compare",
    "layouts_of",
    "load",
    "load_checkpoint",
    "load_newest",
    "newest",
    "restore",
    "restore_average",
    "save",
    "save_checkpoint",
]

"""Checkpoints: named global tensors in HDF5 and everything else in JSON; no pickle, so reading one runs no code.

::

    directory/step-000123/state-<digest>.h5    tensors, or blocks of them: image -> write -> fsync -> rename
    directory/step-000123/manifest.json        names, checksums, position; written last: it is the commit mark

    command       ``distconv checkpoint``: list, verify and export the checkpoints of a run
    files         Files of tensors: HDF5 laid out in memory, and checksums
    lock          A lock on a folder of checkpoints: one job at a time writes to it
    manifest      Manifests: the files and tensors of a checkpoint, that it is finished, and the order of commits
    optimizers    State of an optimizer by the names of its parameters
    pieces        Blocks of tensors in files: whether they cover their tensor, and the part of each that a rank needs
    reading       Reading of checkpoints: each rank reads the blocks that it needs, and verifies their files
    schema        Schema of the manifest, and checks that a schema cannot express
    state         A module, its optimizer and the random number generators as named tensors and plain values
    values        Conversion of plain values to JSON and back
    verification  Verification that a checkpoint's files are there and unchanged since the commit
    writing       Writing of checkpoints: each rank writes its blocks, then rank 0 the commit mark

A step without a manifest was never finished and does not count. A new manifest replaces an old one in one rename, so no
finished step is ever lost. The order of the commits, not the step or the clock, determines the newest checkpoint. The
manifest lists each tensor with the file and the global box of each of its pieces, so any grid can read what any other
grid has written.
"""

from distconv.checkpoint.manifest import newest
from distconv.checkpoint.reading import Checkpoint, CheckpointMetadata, check_tensors_fit, load, load_newest
from distconv.checkpoint.state import (
    Loaded,
    capture_average,
    capture_state,
    check_fits,
    layout_resolver,
    load_checkpoint,
    restore_average,
    restore_state,
    save_checkpoint,
    with_average,
)
from distconv.checkpoint.writing import AsyncSave, save
from distconv.deprecation import former_names

__all__ = [
    "AsyncSave",
    "Checkpoint",
    "CheckpointMetadata",
    "Loaded",
    "capture_average",
    "capture_state",
    "check_fits",
    "check_tensors_fit",
    "layout_resolver",
    "load",
    "load_checkpoint",
    "load_newest",
    "newest",
    "restore_average",
    "restore_state",
    "save",
    "save_checkpoint",
    "with_average",
]

__getattr__ = former_names(
    __name__,
    {
        "Contents": "CheckpointMetadata",
        "Saving": "AsyncSave",
        "averaged": "with_average",
        "capture": "capture_state",
        "compare": "check_tensors_fit",
        "layouts_of": "layout_resolver",
        "restore": "restore_state",
    },
)

"""Samples on their way from files to ranks: each rank reads its own boxes alone. ``docs/data.md`` is the guide.

::

    box_function        Samples that a function of the user's reads, box by box
    channel_statistics  Mean, spread and range of each channel of a dataset
    hdf5                HDF5 files of samples: every rank opens them read-only and reads only its own boxes
    loader              A loader that reads ahead: batches of samples as distributed tensors
    opened_file         An HDF5 file that is open for reading, from itself alone
    source              What the loader and the moments ask of where samples come from; ``SampleFile`` is a source
"""

from distconv.data.box_function import BoxFunction
from distconv.data.hdf5 import Layout, SampleFile
from distconv.data.loader import Batch, Field, Loader

__all__ = ["Batch", "BoxFunction", "Field", "Layout", "Loader", "SampleFile"]

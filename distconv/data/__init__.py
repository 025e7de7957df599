"""Samples on their way from files to ranks: each rank reads its own boxes alone. ``docs/data.md`` is the guide.

::

    address             Samples that are no files of this machine: an address of fsspec
    box_function        Samples that a function of the user's reads, box by box
    channel_statistics  Mean, spread and range of each channel of a dataset
    conversion          Values converted to the dtype of a tensor, without losing any
    formats             The formats that samples are stored in, each read by one process alone
    hdf5                Files of samples: every rank opens them read-only and reads only its own boxes
    loader              A loader that reads ahead: batches of samples as distributed tensors
    opened_file         An HDF5 file that is open for reading, from itself alone
    opening             Samples of whatever format a path has, opened as a source
    reading_processes   Reading by several processes: HDF5 has one lock in each
    resizing            Samples resized: a source whose samples have other extents
    source              What the loader and the moments ask of where samples come from; ``SampleFile`` is a source
"""

from distconv.data.address import Address
from distconv.data.box_function import BoxFunction
from distconv.data.channel_statistics import Moments, moments
from distconv.data.hdf5 import Layout, SampleFile
from distconv.data.loader import Batch, Field, Loader
from distconv.data.opening import open_source
from distconv.data.reading_processes import Portable, ReadByProcesses
from distconv.data.resizing import Resized
from distconv.data.source import StoredSource

__all__ = [
    "Address",
    "Batch",
    "BoxFunction",
    "Field",
    "Layout",
    "Loader",
    "Moments",
    "Portable",
    "ReadByProcesses",
    "Resized",
    "SampleFile",
    "StoredSource",
    "moments",
    "open_source",
]

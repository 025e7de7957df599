"""Samples from files to distributed tensors: each rank reads only its own boxes.

``docs/how-to/read-data.md`` is the guide.

::

    address             Locations of samples that are not files of this machine: URLs that fsspec understands
    box_function        Samples that a function of the user's returns, box by box
    channel_statistics  Mean, standard deviation and range of each channel of a dataset
    conversion          Conversion of stored values to the dtype of a tensor without losing any
    coordinates         Coordinates and attributes of variables on a grid, as netCDF and xarray have them
    formats             The formats of stored samples, each read by one process alone
    gridded             Samples of climate and flow data: variables on a grid as channels, at one time or at several
    gridded_files       Files of variables on a grid: their dimensions, coordinates and times
    hdf5                Datasets of samples in files: every rank opens them read-only and reads only its own boxes
    loader              A loader that prefetches: batches of samples as distributed tensors
    opened_file         Opening of one HDF5 file for reading, without following links to other files
    opening             Opening of samples of any format as a source
    reading_processes   Reading by several processes per rank: HDF5 has one lock in each process
    resizing            A source whose samples are resized
    source              The interface between a source of samples and its readers; ``SampleFile`` is a source
"""

from distconv.data.address import Url
from distconv.data.box_function import BoxFunction
from distconv.data.channel_statistics import Moments, moments
from distconv.data.coordinates import Coordinate
from distconv.data.gridded import GriddedSource, latitude_weights, open_gridded
from distconv.data.hdf5 import DatasetLayout, SampleFile
from distconv.data.loader import Batch, Field, Loader
from distconv.data.opening import open_source
from distconv.data.reading_processes import PicklableSource, ReadByProcesses
from distconv.data.resizing import Resized
from distconv.data.source import StoredSource
from distconv.deprecation import former_names

__all__ = [
    "Batch",
    "BoxFunction",
    "Coordinate",
    "DatasetLayout",
    "Field",
    "GriddedSource",
    "Loader",
    "Moments",
    "PicklableSource",
    "ReadByProcesses",
    "Resized",
    "SampleFile",
    "StoredSource",
    "Url",
    "latitude_weights",
    "moments",
    "open_gridded",
    "open_source",
]

__getattr__ = former_names(__name__, {"Address": "Url", "Layout": "DatasetLayout", "Portable": "PicklableSource"})

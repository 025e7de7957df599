"""Samples on their way from files to ranks.

::

    channel_statistics  Mean, spread and range of each channel of a dataset
    hdf5                HDF5 files of samples: every rank opens them read-only and reads only its own boxes
    loader              A loader that reads ahead: batches of an HDF5 file as distributed tensors
    source              What the loader and the moments ask of where samples come from; ``SampleFile`` is a source
"""

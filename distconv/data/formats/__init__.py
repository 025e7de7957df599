"""The formats of stored samples, each read by one process alone.

Modules of this package must not import MPI or torch, because reading processes (``reader_server``) import them.

::

    decoding          Decoding of values whose meaning is in attributes, by xarray
    gridded_channels  Variables on a grid as the channels of samples
    hdf5_files        HDF5 and netCDF 4: one file, or the samples of several files concatenated
    nifti             NIfTI volumes, read by nibabel: a file is one sample
    npy               NumPy's .npy files, mapped into memory
    reader_server     A process that reads boxes in its own child processes
    store             The interface of all formats: datasets by name, boxes of them, the identity of their files
    virtual           HDF5 virtual datasets: their sources lie in the folder of the file, and cover them
    zarr_groups       zarr groups, format 2 and 3
"""

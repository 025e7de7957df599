"""The formats that samples are stored in, each read by one process alone: no MPI and no torch here.

::

    decoding       Values whose meaning is in attributes, decoded by xarray
    hdf5_files     HDF5 and netCDF 4: one file, or the samples of many one behind the other
    npy            NumPy's .npy files, mapped into memory
    reader_server  A process that reads boxes in children of its own
    store          What all formats have in common: datasets by name, boxes of them, the state of their files
    virtual        HDF5 virtual datasets: their sources lie in the folder of the file, and cover them
    zarr_groups    zarr groups, format 2 and 3
"""

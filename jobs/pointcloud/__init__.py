"""Point clouds: meshes and shapes to sample, files of clouds, voxels, and training of sparse networks.

::

    baselines       Baseline for networks on voxels: a perceptron on single points
    batches         Mini-batches of voxels: points drawn from clouds, voxelized and concatenated
    classification  Training of sparse networks that classify point clouds
    clouds          A labelled cloud, and the interface of a set of clouds
    datafile        HDF5 files of point clouds: their layout, and writing them on all ranks
    datasets        Point clouds opened for training: files in two formats, and folders of meshes
    folders         A folder of meshes and point files laid out as ModelNet: class/train/*, class/test/*
    off             Triangle meshes from OFF files
    point_files     Point clouds and meshes from PLY, NPY and NPZ files
    sampling        Uniform sampling of points on a mesh, and of the points of a cloud in an epoch
    shapes          Labelled shapes generated from a seed, for runs without a data set
    surfaces        Surfaces as triangle meshes, from which shapes are composed
    voxels          Conversion of points to the voxels that contain them
"""

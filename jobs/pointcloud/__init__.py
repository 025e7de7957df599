"""Point clouds: meshes and shapes to sample, files of clouds, voxels, and what a network has to beat.

::

    baselines       What a network on voxels has to beat: a perceptron on single points
    batches         Mini-batches of voxels: the clouds of a step, drawn, voxelised and put together
    classification  Training of sparse networks that tell the classes of point clouds
    clouds          A labelled cloud, and what any set of them offers
    datafile        HDF5 files of point clouds: their layout, and their writing on all ranks together
    datasets        Point clouds opened for training: files in two formats, and folders of meshes
    folders         A folder of OFF meshes laid out as ModelNet: class/train/*.off, class/test/*.off
    off             Triangle meshes from OFF files
    sampling        Points on a mesh, uniformly by area, and the points of a cloud that an epoch takes
    shapes          Labelled shapes made from a seed, so that a fresh machine has point clouds
    surfaces        The surfaces that shapes are made of, as triangle meshes
    voxels          From points to the voxels they fill: coordinates, features, parts
"""

"""Cost of sparse networks over process grids, counted from the sites of an example.

A site is a position of the grid of voxels at which a sparse tensor has features, which are one row of a matrix. A pair
is an input site and an output site that one offset of a kernel connects. A kernel map lists the pairs of each offset.

::

    counted_profile  ``counted_profile``: a layer profile of one process
    grids            ``select_grid``: the fastest grid of samples and space that fits
    recording        ``record``: the operations of a sparse network on the sites of an example
    site_costs       Times and memory of operations, and of a training step, whose sites are split over a grid
"""

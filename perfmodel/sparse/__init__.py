"""What sparse networks cost over grids, from the sites of an example: pairs count, not voxels.

::

    grids       ``select_grid``: the fastest grid of samples and space that fits
    recording   ``record``: what a sparse network does to the sites of an example
    site_costs  Time and memory of a training step whose sites are split over a grid
"""

"""What sparse networks cost, from the sites of an example: pairs count, not voxels.

::

    counted_profile  ``counted_profile``: a layer profile of one process
    grids            ``select_grid``: the fastest grid of samples and space that fits
    recording        ``record``: what a sparse network does to the sites of an example
    site_costs       Times and memory of operations whose sites are split over a grid
    step_prediction  ``predict``: a training step of all of them
"""

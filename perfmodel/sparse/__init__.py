"""Cost of sparse networks over process grids, counted from the sites of an example.

::

    counted_profile  ``counted_profile``: a layer profile of one process
    grids            ``select_grid``: the fastest grid of samples and space that fits
    recording        ``record``: the operations of a sparse network on the sites of an example
    site_costs       Times and memory of operations whose sites are split over a grid
    step_prediction  ``predict``: the time and memory of a training step
"""

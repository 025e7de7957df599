"""Search for the fastest plan that fits into memory.

::

    bucket_elimination    Smallest weighted sum of tables over all choices, by variable elimination
    label_search          Search over partial choices, with bounds and dominance
    lagrange_multipliers  Weights of the sums whose additive minimum is the largest lower bound
    longest_path          Strategy selection of the paper: shortest path along the longest path of layers
    selection             ``select``: the fastest plan that fits, with a proven bound
    solver                Fastest or smallest choice of candidates, with a proven bound
"""

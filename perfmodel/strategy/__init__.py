"""Which plan is the fastest that fits: the searches among distributions.

::

    bucket_elimination    The smallest weighted sum of tables over all choices, by variable elimination
    label_search          Search over partial choices
    lagrange_multipliers  Weights of sums with which their additive minimum comes closest to the makespan
    longest_path          The strategy selector of the paper
    selection             ``select``: the fastest plan that fits, with how close to the best it is proven to be
    solver                The best choice of candidates
"""

"""Which plan is the fastest that fits: candidates, and the searches among them.

::

    bucket_elimination    The smallest weighted sum of tables over all choices, by variable elimination
    candidates            Which distribution a plan gives each deciding layer of a graph, and which ones it could
    cost_tables           A strategy's cost as tables: what the planner evaluates and what the search minimises
    label_search          Search over partial choices
    lagrange_multipliers  Multipliers: weights of sums with which their additive minimum comes closest to the
    longest_path          The strategy selector of the paper
    selection             ``select``: the fastest plan that fits, with how close to the best it is proven to be
    solver                The best choice of candidates
"""

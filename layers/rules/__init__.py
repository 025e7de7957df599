"""Rules with which users declare the input that their own operators need.

distconv exchanges the halo, and the operator computes on blocks.

::

    check   Comparison of an operator that has a rule with the single-process result, on all grids
    rule    ``distconv.rule``: an operator that declares the windows of its input
    window  Windows: the input indices of a dimension from which an output index is computed
"""

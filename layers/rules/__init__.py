"""Rules with which users declare the input that their own operators need.

distconv exchanges the halo, and the operator computes on blocks.

::

    check   Comparison of an operator with a rule with a single process, on all grids
    rule    ``distconv.rule``: an operator that declares the windows of its input
    window  Windows: the input indices of a dimension from which an output index is computed
"""

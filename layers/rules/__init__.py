"""Rules for operators of a user's own: what of its input an operator needs; the halo is ours.

::

    check   Whether an operator with a rule is the same on any grid: values and gradients against one process
    rule    ``distconv.rule``: an operator that declares what windows of its input it needs
    window  Windows: what of a dimension an output index is computed from
"""

"""What the commands that plan share.

::

    options         What the commands that plan have in common
    picture         Pictures of plans: which layer is split how, where its time goes
    report          What ``distconv plan`` prints besides the strategy's own reasons
    strong_scaling  Predicted step times over numbers of ranks
"""

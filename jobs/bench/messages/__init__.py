"""Benchmarks of communication alone, each against MPI with what is to be sent and nothing else.

::

    allreduce     ``distconv bench allreduce``: the sum of a network's gradients behind a backward pass
    halo          ``distconv bench halo``: a halo exchange and its adjoint
    raw_transfer  What a transfer costs by MPI alone
    redistribute  ``distconv bench redistribute``: a tensor from one distribution to another
"""

WARM_UP = 5
"""Rounds that are not counted."""

"""Benchmarks of communication alone, each against MPI that sends the same data and nothing else.

::

    allreduce     ``distconv bench allreduce``: the gradient all-reduce of a network during backward
    halo          ``distconv bench halo``: a halo exchange and its adjoint
    raw_transfer  Transfers by MPI alone, as a reference
    redistribute  ``distconv bench redistribute``: a tensor from one distribution to another
"""

WARM_UP = 5
"""Rounds that are not counted."""

"""SparsePipe's partitions over mixed GPUs.

::

    command  Prints how networks are cut into pipeline stages: published layer profiles, and SparsePipe's mixed GPUs
    setting  SparsePipe's heterogeneous setting
"""

"""What each layer of a network takes: measured, predicted, or read from a file.

::

    joined_layers       A layer profile of blocks of layers: what lies between the places where a network may be cut
    layer_profile       What each layer of a network costs, as measured: times, bytes, and which layer reads which
    layer_timing        Measured layer profiles: seconds and bytes of each layer while the network runs
    measure_operations  Measured times of operations on one rank, the table of a machine
    predicted_profile   A layer profile without a run
"""

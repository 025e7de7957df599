"""Layer profiles: times and sizes, measured, predicted or read from a file.

::

    joined_layers       Layer profile of blocks of layers, between the positions where a network may be split
    layer_profile       Layer profile: times and sizes of each layer, and which layer reads which
    layer_timing        Measurement of layer profiles while the full network trains
    measure_operations  Measurement of operations on one rank, for the table of a machine
    predicted_profile   Layer profile predicted from a traced network and a machine
"""

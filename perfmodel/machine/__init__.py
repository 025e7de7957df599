"""What a machine can do: its links, its collectives, its compute; read from YAML or measured.

::

    collectives       Seconds that collective communication takes
    distributed_gemm  Seconds of communication of layers whose channels are split
    links             Links between ranks, and groups of ranks that talk to each other
    machine           What a machine can do: links, memory, and how fast its ranks compute
    measure_links     Measures links under MPI, with the messages and allreduces that distconv itself sends
    units             Quantities that carry their units, in files and on the command line
"""

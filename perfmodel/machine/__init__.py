"""What a machine can do: its links, its collectives, its compute; read from YAML or measured.

::

    collectives    Seconds that collective communication takes
    links          Links between ranks, and groups of ranks that talk to each other
    machine        What a machine can do: links, memory, and how fast its ranks compute
    measure_links  Measures links under MPI, with the messages and allreduces that distconv itself sends
    units          Strict reading of YAML files in which quantities carry their units
"""

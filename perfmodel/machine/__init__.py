"""Machine models: links, collectives and compute, read from YAML or measured.

::

    collectives       Time of collective communication over one and two levels of links
    distributed_gemm  Time of communication of layers whose channels are split
    links             Links between ranks, and groups of ranks that communicate
    machine           Machine: links, memory and compute of its ranks, in a YAML file
    measure_links     Measurement of links under MPI, with the messages and all-reduces that distconv itself sends
    step_mode         Memory format of steps, and eager or captured steps
    units             Quantities that carry their units, in files and on the command line
"""

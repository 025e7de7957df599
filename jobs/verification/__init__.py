"""Checks against one process and against measurements: ``distconv verify``.

::

    accuracy       Predicted beside measured steps: a row for each, and how far they are apart
    captures       Captured steps against eager ones, bit for bit: random networks
    conformance    Conformance: every operator and option on every kind of grid against one process, from one table
    differential   Random differential runs: the distributed operators and whole small networks against one-process
    engine         The engine of all comparisons with one process: a case, in its layouts, over the ranks of jobs
    exactness      Compare training over a grid with plain torch on one process
    pipelines      How far predicted step times of pipelines are off: ``mpiexec -n 2 distconv verify pipelines``
    predictions    How far predictions are off on this machine: ``mpiexec -n 2 distconv verify predictions``
    soak           Disturb a training at random, and compare it with one that was left alone: ``distconv verify soak``
"""

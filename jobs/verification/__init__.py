"""Checks against one process and against measurements: ``distconv verify``.

::

    accuracy       Accuracy of predicted step times: a row for each measurement, and statistics of the errors
    captures       Captured steps against eager ones, bit for bit: random networks
    conformance    Every operator and option on every kind of grid against one process, from one table
    differential   Random differential runs: the distributed operators and whole small networks against one-process
    engine         The engine of all comparisons with one process: a case, in its layouts, over the ranks of jobs
    exactness      Compare training over a grid with plain torch on one process
    pipelines      Errors of predicted pipeline step times: ``mpiexec -n 2 distconv verify pipelines``
    predictions    Errors of predicted training step times: ``mpiexec -n 2 distconv verify predictions``
    soak           Disturb a training at random, and compare it with an undisturbed run: ``distconv verify soak``
"""

"""Checks against one process and against measurements: ``distconv verify``.

::

    accuracy       Accuracy of predicted step times: a row for each measurement, and statistics of the errors
    captures       Captured steps against eager ones, bit for bit: random networks
    conformance    Every operator and option on every kind of grid against one process, from one table
    differential   Random differential runs: operators and small networks over ranks against plain torch on one process
    engine         Engine of the comparisons: computes cases on one process and over ranks, and returns verdicts
    exactness      Comparison of training over a grid with plain torch on one process
    pipelines      Errors of predicted pipeline step times: ``mpiexec -n 2 distconv verify pipelines``
    predictions    Errors of predicted training step times: ``mpiexec -n 2 distconv verify predictions``
    soak           Training that is disturbed at random, compared with an undisturbed run: ``distconv verify soak``
"""

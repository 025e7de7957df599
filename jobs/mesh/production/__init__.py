"""Production of a data set: runs of the solver, distributed over ranks.

::

    channels    The 18 channels of a sample, computed from the state of a run
    cost        Cost of a run, measured over a few steps
    datafile    Assembly of the data set file from finished runs
    parts       Runs of a data set: which are needed, claims by ranks, files of finished runs
    production  Performing the runs of a data set on all ranks
    run         One run: from an initial condition to accepted samples
"""

"""From initial conditions to a data set: runs of the solver, shared out over ranks.

::

    channels    The 18 channels of a sample, computed from the state of a run
    cost        What a run of a given size costs, measured over a few steps
    datafile    The data set file, put together from finished runs
    parts       Runs on their way into a data set
    production  Doing the runs of a data set on all ranks together
    run         One run: from an initial condition to the samples that are accepted
"""

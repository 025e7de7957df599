"""Traces of a stretch of steps: what each rank did, when, and where the time went.

::

    breakdown  Where the time of a trace went: parts of it that add up, for each rank
    chrome     Traces in Chrome's format: what torch.profiler writes, and several of them on one clock
    steps      Some of the steps of a training, traced
    trace      ``trace``: the profiler of each rank, over a stretch that all of them enter and leave together
"""

"""Traces of training steps: what each rank did, when, and where the time went.

::

    breakdown  Breakdown of the time of a trace for each rank
    chrome     Traces in Chrome's format, as torch.profiler writes them; merging those of several ranks
    trace      ``trace``: run the profiler on all ranks for a block of code, or for selected training steps
"""

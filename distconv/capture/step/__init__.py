"""Runs of a step while it is recorded.

::

    differences   Where two runs of a step did something else
    independence  Whether a step does the same whatever there is in the places into which it puts something
    run           One run of a step, and all that it leaves
"""

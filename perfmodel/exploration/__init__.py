"""Joint search over split points, replicas, distributions within stages, and schedules.

::

    candidate_stages  Cost of the stages of a pipeline for any split points
    choices           Results of an exploration
    cuts              Split points chosen for one schedule
    explore           ``explore``: data parallelism or a pipeline, and the schedule
"""

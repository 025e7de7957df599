"""Parallelisations searched together: cuts, replicas, distributions within stages, schedules.

::

    candidate_stages  What stages of a pipeline cost for any cuts
    choices           What an exploration looked at, and what came out
    cuts              Cuts chosen for one schedule
    explore           ``explore``: data parallelism or a pipeline, with which schedule
"""

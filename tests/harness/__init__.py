"""Runs tests under MPI: jobs of several ranks, one outcome per test, no hang, no failure that goes unseen.

``run.py`` (the driver) -> ``launch.py`` (one job) -> ``rank.py`` (one rank) -> ``plugin.py`` (pytest on that rank),
which uses ``selection.py`` (which tests a run has), ``watchdog.py`` (time limits), ``agreement.py`` (outcomes
compared across ranks) and ``records.py`` (result files).
"""

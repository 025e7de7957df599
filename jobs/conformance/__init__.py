"""Conformance: every operator and option on every kind of grid against one process, from one table.

    mpiexec -n 4 distconv conformance
    python -m distconv.jobs.conformance.page --ranks 2,3,4,6,8

``case.py`` (a case is data) and ``layouts.py`` (how its tensors are split) -> ``families/`` (the table) ->
``runner.py`` (one process, then the ranks) -> ``report.py`` (lines, totals, JSON) -> ``page.py`` (docs/conformance.md).
"""

"""Conformance: every operator and option on every kind of grid against one process, from one table.

``case.py`` (a case is data) and ``layouts.py`` (how its tensors are split) -> ``families/`` (the table) ->
``runner.py`` (one process, then the ranks) -> ``report.py`` (lines, totals, JSON) -> ``page.py`` (the page).

::

    case         A case of the conformance table
    command      ``distconv verify conformance``: every operator and option on every kind of grid against one process
    dense_sites  What sparse layers compute, on volumes: torch's own dense operators
    families     The conformance table, one module per family of operators
    layouts      How the tensors of a case are split
    page         The page ``docs/evidence/conformance.md``: lines of runs on several rank counts as tables
    report       What a run found, as text, JSON, and totals
    runner       Runs cases in one process and over the ranks of a job, and says what came of each
"""

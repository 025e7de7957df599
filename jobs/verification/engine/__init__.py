"""The engine of all comparisons with one process: a case, in its layouts, over the ranks of jobs.

A *case* is a computation on given inputs, such as one operator with one set of options. A *layout* is a grid, with a
distribution of the inputs over it. Every rank computes a case twice: with plain torch on the full inputs, and with
distconv on its blocks. The comparison of both gives a *verdict* for each layout.

``backends.py`` (one process, or ranks) and ``layouts.py`` (how inputs are split) -> ``runner.py`` (a case on both)
-> ``verdicts.py`` (comparison) -> ``journal.py`` (lines) -> ``launch.py`` (all cases, in jobs that resume after hangs).
Cases come from three sources: the table and torch's samples (``conformance``), and random draws (``differential``).

::

    backends  The backends that compute a case: one process, and the ranks
    journal   Results of cases: a line for each layout, as string and JSON, totals, and a journal
    launch    Runs cases on the ranks of this job, or in jobs that a command starts, one after the other
    layouts   Layouts of a case: one for each kind of grid
    runner    Computes cases in one process and over the ranks of a job, and returns their verdicts
    verdicts  Verdicts on a case on one layout: their kinds, comparison of results, decision over all ranks
    watch     A time limit on each case of a run: a case that hangs is named and ends the job
"""

"""The engine of all comparisons with one process: a case, in its layouts, over the ranks of jobs.

``worlds.py`` (one process, or ranks) and ``layouts.py`` (how inputs are split) -> ``runner.py`` (a case in both worlds)
-> ``verdicts.py`` (what came of it) -> ``journal.py`` (lines) -> ``launch.py`` (all cases, in jobs, past what hangs).
Cases come from three sources: the table and torch's samples (``conformance``), and random draws (``differential``).

::

    journal   What came of cases: a line for each layout, as text, as JSON, in totals, and in a journal
    launch    Runs cases on the ranks of this job, or in jobs that a command starts, one after the other
    layouts   How the tensors of a case are split
    runner    Computes cases in one process and over the ranks of a job, and says what came of each
    verdicts  What came of a case on one layout: the ends it may have, what differs, and who decides
    watch     A time limit on each case of a run: what hangs is named, and ends the job
    worlds    The worlds in which a case is computed: one process, and the ranks
"""

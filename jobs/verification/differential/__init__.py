"""Random differential runs: the distributed operators and whole small networks against one-process torch.

``draw.py`` (a case from two numbers) -> ``operators/`` and ``networks.py`` (what is drawn) -> ``worlds.py`` (one
program, run in one process and over the ranks) -> ``verdicts.py`` (what came of it) -> ``runs.py`` (many cases).

::

    blocks     Blocks and heads of which networks are drawn
    command    ``distconv verify differential``
    draw       Draws cases: everything random about one comes from two numbers, so that all ranks draw the same
    launch     Starts jobs of several ranks, one after the other, from a command that was called on one
    networks   Draws small networks and training steps: where a gradient summed over the wrong ranks hides
    operators  Draws single operators: geometry, options and shapes, awkward ones on purpose; one module per family
    runs       Runs cases one after the other on the ranks of a job, with a time limit on each
    verdicts   What came of a case: exact, refused, unsupported, or wrong
    watch      A time limit on each case of a run: what hangs is named, and ends the job
    worlds     The two worlds in which a program runs
"""

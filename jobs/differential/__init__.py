"""Random differential runs: the distributed operators and whole small networks against one-process torch.

    mpiexec -n 4 python -m distconv.jobs.differential --cases 500 --seed 0
    python -m distconv.jobs.differential --ranks 1,2,3,4,5,6 --cases 500

``draw.py`` (a case from two numbers) -> ``operators/`` and ``networks.py`` (what is drawn) -> ``worlds.py`` (one
program, run in one process and over the ranks) -> ``verdicts.py`` (what came of it) -> ``runs.py`` (many cases).
"""

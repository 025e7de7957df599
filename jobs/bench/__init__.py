"""``distconv bench``: microbenchmarks, each with a reference measured in the same run.

::

    child_processes  Runs benchmarks in processes outside the job, and measures their memory
    layers           Benchmarks of single layers
    messages         Benchmarks of communication alone
    pipeline         ``distconv bench pipeline``
    planner          ``distconv bench planner``: the exact search against the paper's selector
    plans            ``distconv bench plans``: pipeline plan files side by side
    report           Output of benchmarks: the command, the machine, tables of times, and JSON
    steps            Benchmarks of whole training steps
"""

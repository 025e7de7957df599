"""``distconv bench``: microbenchmarks, each with a reference measured in the same run.

::

    child_processes  Runs in processes of their own, and the memory that they take
    layers           Benchmarks of single layers
    messages         Benchmarks of communication alone
    pipeline         ``distconv bench pipeline``
    planner          ``distconv bench planner``: the exact search against the paper's selector
    plans            ``distconv bench plans``: pipeline plan files side by side
    report           What benchmarks print: the command, the machine, tables of times, and JSON
    steps            Benchmarks of whole training steps
"""

"""``distconv bench``: microbenchmarks, each with a reference measured in the same run.

::

    comparison  For benchmarks that have a prediction beside each measurement
    layers      Benchmarks of single layers
    messages    Benchmarks of communication alone
    pipeline    ``distconv bench pipeline``
    planner     ``distconv bench planner``: the exact search against the paper's selector
    report      What benchmarks print: the command, the machine, a table of medians with their spread, and JSON
    steps       Benchmarks of whole training steps
"""

"""``distconv bench``: microbenchmarks, each with a reference measured in the same run.

::

    comparison  For benchmarks that have a prediction beside each measurement
    gpu         ``distconv bench gpu``: a step on one GPU against plain torch, and what ranks hide of an exchange
    layers      Benchmarks of single layers
    memory      Peak resident memory of one training step
    messages    Benchmarks of communication alone
    pipeline    ``distconv bench pipeline``
    planner     ``distconv bench planner``: the exact search against the paper's selector
    report      What benchmarks print: the command, the machine, a table of medians with their spread, and JSON
    scaling     ``distconv bench scaling``
    step        ``distconv bench step``: one training step split over ranks against plain torch
    torch_step  The step that ``distconv bench step`` times
"""

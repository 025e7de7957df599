"""Benchmarks of complete training steps: their time, their memory, and the overhead of safeguards.

::

    gpu            ``distconv bench gpu``: a step on one GPU against plain torch, and the hidden part of an exchange
    memory         ``distconv bench memory``: peak resident memory of one training step
    model_options  Options that name a model and its samples, and a training step of it on random numbers
    safeguards     ``distconv bench safeguards``: cost of comparing ranks and of writing checkpoints
    scaling        ``distconv bench scaling``
    step           ``distconv bench step``: one training step split over ranks against plain torch
    torch_process  Plain torch in child processes, the reference of ``distconv bench step`` and ``bench layer``
    torch_step     The step that they time
"""

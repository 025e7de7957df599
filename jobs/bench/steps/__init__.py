"""Benchmarks of whole training steps: their time, their memory, and what runs beside them.

::

    gpu            ``distconv bench gpu``: a step on one GPU against plain torch, and what ranks hide of an exchange
    memory         ``distconv bench memory``: peak resident memory of one training step
    model_options  Options that name a model and its samples, and a training step of it on random numbers
    safeguards     ``distconv bench safeguards``: what comparing ranks and writing checkpoints cost beside a step
    scaling        ``distconv bench scaling``
    step           ``distconv bench step``: one training step split over ranks against plain torch
    torch_step     The step that ``distconv bench step`` times
"""

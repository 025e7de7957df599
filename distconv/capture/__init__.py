"""Steps that are recorded once and replayed below Python's dispatch, bit for bit.

::

    captured    ``dc.capture``
    entries     What a recording consists of: slots, which stand for tensors, and entries
    graph       Replays on a GPU: what a recording does, launched as one CUDA graph
    messages    What a replay sends
    outcome     What a step has left, bit for bit
    placement   Where the tensors of a replay lie, and what of a recording is left to be done
    program     A recording as straight-line Python
    recorder    The mode that records a step
    state       Gradients of leaves, and shares of them that are kept under no_sync; settings
    step        Runs of a step while it is recorded: what they leave, and where they differ
    unseen      What no operator is called for: values that leave torch, random generators that are set
    watch       What a recording depends on besides values
"""

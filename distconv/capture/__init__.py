"""Steps that are recorded once and replayed below Python's dispatch, bit for bit.

::

    entries     What a recording consists of: slots, which stand for tensors, and entries
    state       Gradients of leaves, and shares of them that are kept under no_sync; settings
    watch       What a recording depends on besides values
    recorder    The mode that records a step
    unseen      What no operator is called for: values that leave torch, random generators that are set
    steps       One run of a step while it is recorded, and all that it leaves
    outcome     What a step has left, bit for bit
    messages    What a replay sends
    program     A recording as straight-line Python
    captured    ``dc.capture``
"""

"""Steps that are recorded once and replayed below Python's dispatch, bit for bit.

::

    captured       ``dc.capture``
    entries        The instructions of a recording, and the tensors that they read and make
    gradients      Gradients of leaves, as a step finds them
    graph          Replays on a GPU, as one CUDA graph
    guards         What is compared before each replay
    messages       Messages of a replay
    outcome        Comparison of a replay with the eager step
    placement      Memory of the tensors of a replay, and instructions that can be left out
    program        A recording as straight-line Python
    python_access  Functions of torch that read or change state without calling an operator
    recorder       The dispatch mode that records a step
    run            One recorded run of a step
"""

"""Capture: a step is recorded once, and replayed below Python's dispatch with bitwise identical results.

::

    captured       ``dc.capture``
    entries        Operations of a recording (entries), and the tensors that they read and make (slots)
    gradients      Gradients of leaves before a step
    graph          Replays on a GPU, as one CUDA graph
    guards         Conditions that are checked before each replay
    messages       Messages and all-reduces of a replay
    outcome        Comparison of a replay with the eager step
    placement      Memory of the tensors of a replay, and removal of unneeded operations
    program        Python code that is generated from a recording
    python_access  Detection of reads and changes of state that call no operator
    recorder       The dispatch mode that records a step
    run            One recorded run of a step

Layers and communication do not import this package. They notify a recorder through :mod:`distconv.recording`.
"""

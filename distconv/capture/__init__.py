"""Capture: a step is recorded once, and replayed below Python's dispatch with bitwise identical results.

::

    buffer_plan    Memory of the tensors of a replay, and removal of unneeded operations
    captured       ``dc.capture``
    gradients      Gradients of leaves before a step
    graph          Replays on a GPU, as one CUDA graph
    guards         Conditions that are checked before each replay
    messages       Messages and all-reduces of a replay
    operations     Operations of a recording, and the tensors that they read and make (slots)
    outcome        Comparison of a replay with the eager step
    python_access  Detection of reads and changes of state that call no operator
    recorder       The dispatch mode that records a step
    replay_code    Python code that is generated from a recording
    run            One recorded run of a step

Layers and communication do not import this package. They notify a recorder through :mod:`distconv.recording`.
"""

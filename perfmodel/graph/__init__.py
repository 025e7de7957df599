"""Layer graph of a network, recorded from one run.

::

    graph     Layers of a network and the values between them, as recorded by :func:`distconv.perfmodel.trace`
    recorder  Recording of a running model: calls of its modules and of torch functions
    tracing   ``trace``: the graph of a network from one run on meta tensors, which have shapes but no elements
"""

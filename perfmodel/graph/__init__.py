"""A network as the planner sees it.

::

    graph     The layers of a network and what flows between them, as recorded by :func:`distconv.perfmodel.trace`
    recorder  What a model calls while it runs: its modules, and the torch functions inside
    tracing   ``trace``: the graph of a network from one run on meta tensors, which have shapes but no elements
"""

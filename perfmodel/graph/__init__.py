"""A network as the planner sees it.

::

    graph    The layers of a network and what flows between them, as recorded by :func:`distconv.perfmodel.trace`
    tracing  ``trace``: the graph of a network from one run on meta tensors, which have shapes but no elements
"""

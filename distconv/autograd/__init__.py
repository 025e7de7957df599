"""Autograd's graph with distributed tensors in it: derivatives of any order, nodes, users' own functions.

::

    anomalies       ``torch.autograd.detect_anomaly``: all ranks learn of a NaN on any
    derivatives     Backward passes that have no derivative of their own
    gradient_edges  Edges by which gradients are asked for and given: what passes there is whole
    graph_nodes     Nodes of autograd's graph as users of ``grad_fn`` meet them
    recomputation   ``torch.utils.checkpoint``: all ranks recompute a block at one place, and up to one place
    user_functions  ``torch.autograd.Function.apply``: nothing distributed gets lost in it
"""

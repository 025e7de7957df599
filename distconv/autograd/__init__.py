"""Autograd with distributed tensors: derivatives of any order, graph nodes, checkpointing, users' own functions.

The graph is recorded for local blocks. These modules show users the graph of full tensors where torch exposes it.

::

    anomalies       ``torch.autograd.detect_anomaly``: all ranks raise if any of them finds a NaN
    derivatives     Second derivatives of backward passes that are not differentiable themselves
    gradient_edges  Gradient edges: gradients that enter or leave the graph there are full tensors
    graph_nodes     ``grad_fn`` of a DistTensor: hooks on it get full gradients
    recomputation   ``torch.utils.checkpoint``: all ranks recompute the same steps at the same time
    user_functions  ``torch.autograd.Function.apply`` with DistTensors
"""

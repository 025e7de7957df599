"""Splitting of an unmodified model into stages.

A model is turned into a list of steps, the nodes of an ``fx.Graph``, and the list is split at positions. A register is
the paper's name for a split point: the place of the tensors that wait between two stages.

::

    fx_graph         Steps of a model, traced by ``torch.fx``
    graph_cuts       Splitting of a graph of steps into those of stages
    recorded_stages  Stages of a model whose forward was recorded, for each number of samples and mode in use
    recording        Recording of a model's steps while its own forward runs with an example
    split            ``split``: the stages of an unmodified model, and the possible split points
"""

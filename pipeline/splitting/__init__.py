"""Splitting of an unmodified model into stages.

::

    fx_graph         Steps of a model, traced by ``torch.fx``
    graph_cuts       Splitting of a graph of steps into those of stages
    recorded_stages  Stages of a model whose forward was recorded, for each number of samples and mode in use
    recording        Recording of a model's steps while its own forward runs with an example
    split            ``split``: the stages of an unmodified model, and the possible split points
"""

"""Cuts of an unmodified model into stages.

::

    fx_graph         What a model does, as a list of steps that can be cut: written down by ``torch.fx``
    graph_cuts       A graph of steps cut into those of stages
    recorded_stages  Stages of a model whose forward was recorded, for each number of samples and mode that come up
    recording        What a model does with an example, recorded while its own forward runs
    split            Cuts an unmodified model into the stages of a pipeline
"""

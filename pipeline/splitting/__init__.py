"""Cuts of an unmodified model into stages.

::

    fx_graph  What a model does, as a list of steps that can be cut: written down by ``torch.fx``
    split     Cuts an unmodified model into the stages of a pipeline
"""

"""Benchmarks of single layers.

::

    layer         ``distconv bench layer``: a stack of equal convolutions over a grid
    paper_layers  ``distconv bench layer --layer``
    scan          ``distconv bench scan``: ways back through time of a recurrent layer
    sparse        ``distconv bench sparse``: a sparse convolution on a surface against dense convolution of its volume
"""

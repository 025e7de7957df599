"""Benchmarks of single layers, and of sparse networks.

::

    layer         ``distconv bench layer``: a stack of equal convolutions over a grid
    paper_layers  ``distconv bench layer --layer``: a single convolution of the paper, measured and predicted
    pointcloud    ``distconv bench pointcloud``: a sparse network on point clouds and its dense equivalent
    scan          ``distconv bench scan``: backward algorithms of a recurrent layer
    sparse        ``distconv bench sparse``: a sparse convolution on a surface against dense convolution of its volume
"""

"""Predictions with trained networks: what is predicted with, windows over large samples, and what it is worth.

::

    labelled  Predictions of classifiers whose samples are opened as for training
    network   The network of a prediction: that of a run, or of a file of weights
    samples   Predictions of samples that a source reads: whole, or window by window
    scores    What predictions are worth where there are labels, and a picture of some
    windows   Windows over samples, and how what a network makes of them is put together
"""

"""Predictions with trained networks: networks, samples, windows over large samples, and scores.

::

    labelled  Predictions of classifiers whose samples are opened as for training
    network   The network of a prediction: that of a run, or of a file of weights
    samples   Predictions of samples that a source reads: whole, or window by window
    scores    Scores of predictions with labels, and a figure of some samples
    windows   Windows over samples, and blending of their outputs
"""

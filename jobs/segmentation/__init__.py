"""Segmentation: training that predicts a class for each pixel of an image or a volume of the user's data.

::

    loss     Loss of a segmentation network: cross entropy, optionally with soft Dice
    picture  Figure at the end of training: losses, scores, and samples with labels and predictions
    samples  Images and label maps opened for training: number of classes, channel moments, loaders
    scores   Segmentation scores from counts: accuracy, Dice (F1) and intersection over union
    trainer  Training of segmentation networks
"""

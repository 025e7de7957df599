"""Segmentation: a class for each place of an image or a volume, on data of the user's own.

::

    loss     The loss of a segmentation network: cross entropy, with soft Dice or without
    picture  The picture at the end of training: losses, scores, and some samples with their labels and predictions
    samples  Images and label maps opened for training: their classes, their moments, their batches
    scores   How predicted classes compare with labels: accuracy, Dice (F1) and intersection over union from counts
    trainer  A segmentation network in training, whatever its samples are
"""

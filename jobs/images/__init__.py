"""Labelled images: file formats, samples, and training of classifiers.

::

    classification  Training of a classifier on labelled images
    digits          Embedded images of digits, for a first run without a data set
    formats         Readers of MNIST (idx) and CIFAR-10 (binary) files, plain or compressed
    groups          Discovery and opening of the training and test images of a data set
    picture         Figure at the end of a classifier's training
    samples         Labelled images opened for training: number of classes, channel moments, loaders
    sources         Sources of image values for a loader: arrays in memory, and randomly shifted images
"""

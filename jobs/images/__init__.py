"""Labelled images: their files, their training.

::

    classification  Training of a classifier on labelled images: its loss, its accuracy
    digits          An embedded set of images, for a first run without any file
    formats         Labelled images from the files of MNIST (idx) and CIFAR-10 (binary), plain or compressed
    groups          The training and the test images of a data set: which files they are in, opened or read
    picture         The picture at the end of a classifier's training
    samples         A data set of labelled images opened for training: its classes, its moments, its batches
    sources         Where a loader's images come from
"""

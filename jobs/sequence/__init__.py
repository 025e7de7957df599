"""Labelled sequences: bitstreams, sounds, and training of recurrent networks on them.

::

    audio       Labelled sounds of a file or a folder
    bitstreams  Bitstreams of the BPPSA paper: the probability of a set bit depends on the class
    mfcc        Mel-frequency cepstral coefficients of sounds
    picture     Figure at the end of a training
    samples     Training and test sequences, and their mini-batches over a grid
    trainer     Training of recurrent networks: the networks, their settings, the trainer
"""

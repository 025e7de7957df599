"""Labelled sequences: bitstreams, sounds, and the training of recurrent networks on them.

::

    audio       Labelled sounds of a file or a folder
    bitstreams  The bitstreams of the paper: the class is how many bits are set
    mfcc        Mel-frequency cepstral coefficients of sounds
    picture     The picture at the end of a training
    samples     Sequences to train and to test on, and their mini-batches over a grid
    trainer     The networks, their settings, their accuracy
"""

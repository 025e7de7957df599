"""Distributed rules for ``torch.nn.functional``: one module per family of layers.

::

    adaptive_pooling        Adaptive pooling: windows that divide the input into a given number of parts
    attention               Scaled dot-product attention: samples, heads and queries keep their splits
    batch_norm              Batch normalization over distributed samples and space
    convolution             Distributed convolution over samples, space, channels and filters
    dropout                 Dropout in training, with the mask that one process would draw, on any grid
    embedding               Embeddings: indices keep their splits, the table is replicated
    grid_sample             Sampling at given points, and the points of affine maps
    group_norm              Group, instance, layer, RMS and local response normalization of samples that are split
    interpolation           Interpolation in 1-D to 3-D; what needs more than the neighbours' rows gathers space
    linear                  Linear layers: sample-parallel with whole features
    losses                  Losses: each rank sums over its block
    padding                 Padding: constant (also negative), reflect, replicate, circular
    pixel_shuffle           Shuffles between channels and space
    pooling                 Max, average, adaptive and global pooling, with windows that may cross block borders
    recurrent               Recurrent layers and cells: samples keep their splits, and the time of RNN and GRU
    transposed_convolution  Transposed convolution: each rank gathers the inputs that reach its outputs and crops
"""

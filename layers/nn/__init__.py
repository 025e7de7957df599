"""Operators of ``torch.nn.functional``: one module per family of layers.

::

    adaptive_pooling        Adaptive pooling: the windows divide the input into a given number of parts
    attention               Scaled dot-product attention, split over samples, heads and queries
    batch_norm              Batch normalization with statistics over samples and space
    convolution             Convolution, split over samples, space, channels and filters
    dropout                 Dropout with the mask of a single process
    embedding               Embeddings: indices stay split, and the table is replicated
    grid_sample             Sampling at given points, and the points of affine maps
    group_norm              Group, instance, layer and RMS normalization
    interpolation           Interpolation in one to three dimensions
    linear                  Linear layers, split over samples or over features
    losses                  Losses: local sums and one all-reduce
    padding                 Padding: constant (also negative), reflect, replicate and circular
    pixel_shuffle           Shuffles between channels and space, unfold and fold
    pooling                 Max and average pooling with a halo exchange, and unpooling
    recurrent               Recurrent layers and cells, split over samples; RNN and GRU also over time
    transposed_convolution  Transposed convolution, split over samples, space, channels and filters
"""

"""BPPSA's tables and figures: sparsity of Jacobians, FLOP of a scan over a pruned network, training by scan.

::

    adam_staleness    Figure 12: VGG-16 with Adam by PipeDream's pipeline and without one
    command           Prints the tables: ``distconv reproduce bppsa``
    epochs            Tables 4 to 6: seconds of an epoch of RNN and GRU
    jacobian_table    Table 1: zeros, bytes and generation of the transposed Jacobians of VGG-11's first layers
    pruned_vgg        Figure 10: FLOP of each step of a scan over the layers of a pruned VGG-11, and of BP
    ranks_to_win      At how many ranks a scan over a recurrence would win, by machine files
    sound_curves      Figure 13: a GRU on sounds by scan and by autograd, loss by seconds
    training          Figure 6: LeNet-5 trained by scan and by autograd
"""

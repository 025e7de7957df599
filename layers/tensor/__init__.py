"""Distributed rules for making, shaping, indexing and asking tensors.

::

    autograd      ``torch.autograd.grad`` of distributed tensors
    creation      New tensors made after a DistTensor
    foreach       ``torch._foreach_*``, by which optimizers and gradient clipping treat lists of parameters
    index_select  Picking elements by tensors of indices
    indexing      ``x[index]`` and ``x[index] = value``
    joining       cat, stack and what is made of them: each rank puts together its block of the result
    masks         ``x[mask]``: each rank picks from its block
    queries       Questions about tensors whose answer is no tensor; it is the same on all ranks
    refused       What stays refused: functions that reach below values
    reshaping     Views: dimensions that are merged, parted, reordered
    scatter       Writing to positions given by a tensor of indices: scatter and scatter_add, as for one-hot labels
    slicing       Parts of a tensor along its dimensions. A slice is a view
    strides       ``as_strided`` and its kind: of whole tensors
"""

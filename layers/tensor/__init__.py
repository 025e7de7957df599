"""Operators that create, reshape, index and query tensors.

::

    autograd      ``torch.autograd.grad`` and ``backward`` of distributed tensors
    creation      New tensors with the distribution of a DistTensor
    foreach       ``torch._foreach_*`` and fused optimizers, which process lists of parameters
    index_select  Selection by tensors of indices, and repetition
    indexing      ``x[index]`` and ``x[index] = value``
    joining       Concatenation and stacking
    masks         Selection by masks: ``x[mask]``
    queries       Properties of tensors that are not tensors
    reshaping     Views with merged, split, reordered, added or removed dimensions
    scatter       Writing and adding to positions given by tensors of indices
    slicing       Slices and chunks of a tensor along its dimensions
    strides       ``as_strided`` of gathered tensors
    unsupported   Functions that access memory, which are not supported
"""

"""Communication between ranks: transfer plans, messages, differentiable collectives, agreement.

::

    agreement           Agreement between ranks: a difference becomes an error instead of a hang or a wrong result
    collectives         Differentiable communication: pairs of a forward pass and its adjoint, on local blocks
    derived             Registry of derived communicators, which frees those that no rank uses any more
    digest              Digests of tensors, with which ranks detect that their copies differ
    exclusive           Check whether a gradient may be summed in place
    gpu                 Transport of GPU tensors: NCCL, CUDA-aware MPI, or MPI from host memory
    gradient_order      The order in which gradients are reduced, the same on all ranks
    gradient_reduction  All-reduce of parameter gradients, overlapped with the rest of the backward pass
    packing             Packing: copy boxes of tensors into contiguous messages, and back
    routes              Routes: which boxes of a tensor a rank sends to which ranks. No MPI
    transfer            Transfer plans: move a tensor from one layout to another, or add boxes up at their owners
    transport           Transport: nonblocking messages between tensors, and all-reduces
    weight_digest       Checksums of weights, piggybacked on the gradient all-reduce
"""

"""Everything that crosses ranks: the mover, the messages below it, differentiable collectives, agreement.

::

    agreement           Agreement between ranks: they find out that they differ before that is a hang or a wrong number
    collectives         Differentiable communication: pairs of a forward and its adjoint, on the local blocks
    derived             Communicators derived from another one, which go back to MPI when no rank uses them any more
    digest              Digests of tensors, by which ranks find out that theirs differ
    exclusive           Whether a gradient that comes to a backward pass is nobody else's
    gpu                 How tensors of GPUs cross ranks: by NCCL, by an MPI that takes device memory, or by the host
    gradient_order      The order in which gradients are reduced, the same on all ranks
    gradient_reduction  When the gradients of parameters are summed
    packing             Packing: boxes of tensors side by side in contiguous messages, and back
    routes              Routes: which boxes of a tensor a rank sends to whom, and receives from whom. Pure arithmetic
    transfer            The mover: everything that crosses ranks is an intersection of boxes
    transport           Transport: nonblocking messages between tensors, and allreduces, on the host or a GPU
    weight_digest       Digests of weights that ride with the sums of their gradients
"""

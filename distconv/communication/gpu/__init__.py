"""How tensors of GPUs cross ranks: by NCCL, by an MPI that takes device memory, or by way of the host.

::

    cuda_aware        What of a GPU's memory MPI takes: asked of the library, then tried, by all ranks of a communicator
    device_transport  By what the tensors of GPUs cross the ranks of a communicator: decided once, by all of them
    nccl              NCCL, or gloo between CPUs: messages and sums by torch's process groups
    rendezvous        The rendezvous of torch's process groups: ranks find each other through MPI
    staging           Staging: tensors of a GPU on their way to and from MPI, which sees no streams
"""

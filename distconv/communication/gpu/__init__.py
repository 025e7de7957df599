"""Transport of GPU tensors: through NCCL, through a CUDA-aware MPI, or through MPI from host memory.

::

    cuda_aware        Test of whether MPI accepts device memory, for messages and for all-reduces
    device_transport  Choice of the transport for a communicator, made once by all of its ranks
    nccl              Messages and all-reduces through torch's process groups: NCCL, or gloo on CPUs
    rendezvous        Connection of the ranks of torch's process groups, through MPI
    staging           Copies of GPU tensors to and from the memory that MPI uses
"""

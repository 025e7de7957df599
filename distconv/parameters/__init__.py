"""Parameters on a grid: their blocks, their copies, and the state that optimizers keep of them.

::

    channel_split           Which rank has which channels and filters of a layer. Pure arithmetic
    distributed_checkpoint  torch's distributed checkpoints, written and read by one process
    optimizer_state         Optimizer state split over the ranks that hold the same parameters
    replicas                Copies of parameters and buffers on several ranks: whether they still are the same
    sharding                Sharded parameters: each rank holds the block of a weight that it works with
    state_tensor            What state dicts hold of sharded parameters: whole tensors, changes in which pass both ways
    weight_files            Weights as others have them: torch's and safetensors files, and distributed checkpoints
"""

"""What a process does beside computing: its start, its memory, its waits.

::

    call_stack     Where a thread is, as its user knows it: their line, the layer, the function of torch
    command_start  What comes first: an allocator that keeps freed blocks, whether MPI fits its launcher, variables
    endings        How ranks end: all together, or the job ends and names the rank that left or failed
    environment    The environment variables that distconv reads: all of them are here
    launchers      Whether MPI knows of all processes that the launcher started
    memory         How memory is kept from step to step, and what to say when there is none left
    patches        What distconv replaces in torch for as long as the process lives, and why
    profiling      Named ranges in the traces of ``torch.profiler``: ``distconv::conv2d``, ``distconv::wait``, ...
    startup        What a process does when distconv is imported under MPI
    stop_requests  Signals that ask a training to stop
    watchdog       Ends a wait that blocks for too long
"""

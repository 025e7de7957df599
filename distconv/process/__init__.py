"""What a process does beside computing: its start, its memory, its waits.

::

    call_stack     Where a thread is, as its user knows it: their line, the layer, the function of torch
    command_start  The first steps of a process: an allocator that keeps freed blocks, MPI, whether it fits its launcher
    endings        How ranks end: all together, or the job ends and names the rank that left or failed
    environment    The environment variables that distconv reads: all of them are here
    launchers      Whether MPI knows of all processes that the launcher started
    memory         How memory is kept from step to step, and what to say when there is none left
    patches        What distconv replaces in torch for as long as the process lives, and why
    profiling      Named ranges in the traces of ``torch.profiler``: ``distconv::conv2d``, ``distconv::wait``, ...
    startup        The start of a process, at its first grid: launch, variables, memory, threads, its GPU, exits
    stop_requests  Signals that ask a training to stop
    stuck_ranks    Reports of stuck ranks: where every rank is while one of them waits for long
    watchdog       Ends a wait that blocks for too long
"""

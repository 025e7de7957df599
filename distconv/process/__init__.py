"""What a process does beside computing: its start, its memory, its waits.

::

    allocator    How this process's memory is kept, so that large activations are not page-faulted anew
    environment  The environment variables that distconv reads: all of them are here
    information  Print what distconv runs on
    profiling    Named ranges in the traces of ``torch.profiler``: ``distconv::conv2d``, ``distconv::wait``, ...
    startup      What a process does when distconv is imported under MPI
    watchdog     Ends a wait that blocks for too long, and failures on one rank that would leave the others waiting
"""

"""How a process's memory is kept from step to step, and the explanation of out-of-memory errors.

::

    allocator           How this process keeps memory: by its allocator, by glibc's settings, or not at all
    caching_allocators  Allocators that keep freed blocks with few holes: which are installed, which this process has
    out_of_memory       The explanation of an out-of-memory error: where, what was asked for, and what would fit
"""

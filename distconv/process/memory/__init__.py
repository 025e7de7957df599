"""How a process's memory is kept from step to step, and what to say when there is none left.

::

    allocator           Which way of keeping memory this process has
    caching_allocators  Allocators that keep freed blocks with few holes: which are installed, which this process has
    out_of_memory       What to say when a rank has run out of memory
"""

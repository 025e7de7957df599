"""What a recording depends on besides values: arguments, modules, what the function refers to, tensors, settings.

Each part says in a sentence what is not any more what it was; nothing if all is. It is asked in each replay, so it
compares what is there with what was, and describes only what differs.

::

    arguments   Of which shapes, dtypes and distributions the arguments of a step are, and other values
    modules     Modules that a step calls, and tensors that it uses
    optimizers  Optimizers that take their steps in a captured one
    references  Variables that a function's code names, and what is in them
    values      What is in values: in lists, tuples and mappings, and in objects of a user's
"""

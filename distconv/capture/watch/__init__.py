"""What a recording depends on besides values: arguments, modules, what the function refers to, tensors, settings.

Each part says in a sentence what is not any more what it was; nothing if all is. It is asked in each replay, so it
compares what is there with what was, and describes only what differs.

::

    arguments   Of which shapes, dtypes and distributions the arguments of a step are, and other values
    executed    Functions of a user's that run while a step is recorded
    modules     Modules that a step calls, and tensors that it uses
    names       Names in code: of global variables, of those of functions around it, of attributes
    optimizers  Optimizers that take their steps in a captured one
    places      Places outside of a step that it puts something into
    references  Variables that the code of functions names, and what is in them
    structures  Lists, tuples, dictionaries and dataclasses: tensors in them are arguments and results
    values      What is in containers and in objects of a user's, and whether it is what it was
"""

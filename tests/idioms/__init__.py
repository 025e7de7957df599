"""Training scripts as small functions: on grids each gives what it gives in one process.

They mirror no module. Each combines operators, autograd, parameters and an optimizer as scripts do. One operator or one
layer alone is tested in the folder that mirrors it.

::

    bench        A model with its optimizer and data, in one process or on a grid
    table        The list of all idioms, and how the results of one of them differ between grids
    derivatives  Gradients that are changed, differentiated again and seen by hooks
    loops        Training loops: accumulation, scaling, averages, schedules, optimizers
    losses       Losses, augmentations and metrics
    modules      Modules that are hooked, wrapped, tied and converted
    networks     Networks that combine operators as published ones do
"""

"""Random differential runs: operators and small networks over ranks against plain torch on one process.

``draw.py`` (a case from two numbers) -> ``operators.py``, ``windows.py``, ``derivatives.py``, ``networks.py`` (what is
drawn) -> ``layouts.py`` (how its inputs are split) -> ``runs.py`` (many cases, by the engine).

::

    command      ``distconv verify differential``
    derivatives  Draws second derivatives: the gradient of a penalty on gradients, through one layer
    draw         Draws cases: all random choices follow from two numbers, so that all ranks draw the same case
    layouts      Draws the grid, and for every input its distribution and memory layout
    networks     Draws small networks and training steps, which show gradients summed over the wrong ranks
    operators    Draws single operators: windows of awkward geometry, torch's own samples, joins and views
    runs         Draws cases, each from two numbers, and counts their verdicts
    windows      Draws operators of windows: convolutions, poolings, interpolation, padding
"""

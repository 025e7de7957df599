"""Runs of a schedule against costs, and their pictures.

::

    costs     What the actions of a schedule cost: numbers or one per stage, checked once
    events    Runs a schedule's lists against costs, event by event
    gantt     A timeline as a picture
    timeline  When each pass of a schedule ran, simulated or measured, and what follows from it
"""

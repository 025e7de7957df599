"""Runs of a schedule against costs, and their pictures.

::

    costs     What the actions of a schedule cost: numbers or one per stage, checked once
    events    Runs a schedule's lists against costs, event by event
    gantt     Spans as a picture
    span      One pass or update of a schedule: when it ran, simulated or measured
    timeline  When each pass of a schedule ran, simulated or measured, and what follows from it
"""

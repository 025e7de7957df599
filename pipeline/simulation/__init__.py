"""Simulation of a schedule with given costs, timelines and Gantt charts.

::

    costs     Costs of the actions of a schedule, as numbers for each stage
    events    Event simulation of a schedule
    gantt     Gantt charts of timelines
    span      One pass or update: its time and place, simulated or measured
    timeline  Timeline of a schedule, simulated or measured: makespan, bubble, plots
"""

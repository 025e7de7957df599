"""Schedules as lists of actions: generators, messages, weight policies, checks.

::

    actions        Pipeline schedules as data: for each stage the list of its actions, in order
    generators     Order of passes on each stage, one short pure function for each family of schedules
    memory         Memory and weight staleness of a schedule, from its lists without times
    per_stage      Costs as one number for all stages, or one for each
    registry       Schedules by name
    replay         Concurrent replay of several lists of actions
    send_receive   Insertion of sends and receives, such that synchronous sends never deadlock
    steady_state   Asynchronous schedules without an end
    validation     Checks that a schedule can run
    weight_policy  Insertion of updates and weight versions, one function for each kind of policy
"""

"""Schedules as lists of actions: generators, messages, weight policies, checks.

::

    actions        A pipeline schedule as data: for each stage the list of actions that it performs, in order
    generators     The order of passes on each stage, one short pure function for each family of schedules
    memory         What a schedule keeps in memory, and how stale its weights are: read off the lists, without times
    per_stage      A cost as one number for all stages, or one for each
    registry       The schedules by name
    replay         Lists of actions that are gone through side by side, each as far as it can come
    send_receive   Adds sends and receives to the lists of passes, such that synchronous sends never deadlock
    steady_state   An asynchronous schedule without an end
    validation     Checks that a schedule can run
    weight_policy  Adds updates and weight versions to the order of passes: one function for each weight policy
"""

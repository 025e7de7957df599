"""Functions that run are found, and only those: one code may be of several functions."""

from __future__ import annotations

import gc
import sys

import torch
from torch import nn

from distconv.capture.watch.executed import Executed


def helper():
    return 1


def unused():
    return 2


def _found(function, *args):
    executed = Executed()
    with executed.noted(lambda frame: None):
        function(*args)
    return executed.functions()


def test_functions_that_run_are_found():
    found = _found(lambda: [helper() for _ in range(2)])
    assert helper in found
    assert unused not in found


def test_of_one_code_only_the_function_that_has_run_is_found():
    def made(number):
        def function():
            return number

        return function

    functions = [made(object()), made(object()), made(object())]
    found = _found(functions[1])
    assert [each for each in found if each in functions] == [functions[1]]
    both = _found(lambda: (functions[0](), functions[2]()))
    assert [each for each in functions if each in both] == [functions[0], functions[2]]


def test_a_function_that_sets_its_variable_is_found():
    count = 0

    def counting():
        nonlocal count
        count += 1

    assert counting in _found(counting)


def test_functions_of_torch_are_not_looked_for_and_hooks_are():
    module, seen = nn.ReLU(), []

    def hook(*_):
        seen.append(1)

    module.register_forward_hook(hook)
    found = _found(module, nn.Parameter(torch.ones(1)))
    assert seen
    assert [each for each in found if each is hook]
    assert not [each for each in found if each.__module__.startswith("torch")]


def test_a_debugger_of_a_users_is_put_back():
    def trace(*_):
        pass

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        _found(helper)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_a_package_with_the_name_of_one_of_pythons_is_a_users(tmp_path):
    space = {"__name__": "statistics.own", "__file__": str(tmp_path / "statistics" / "own.py")}
    exec("def mean(): return 1", space)
    assert _found(space["mean"]) == [space["mean"]]
    import statistics

    assert statistics.mean not in _found(statistics.mean, [1, 2])


def test_what_collections_of_garbage_call_is_not_the_steps():
    calls = []

    def callback(phase, info):
        calls.append(phase)

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        found = _found(lambda: [[] for _ in range(2000)])
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*threshold)
    assert callback not in found
    assert calls

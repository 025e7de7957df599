"""Replaced functions of torch are in one table, and nothing else assigns to torch's attributes."""

from __future__ import annotations

import ast
import types

import pytest
import torch

import distconv as dc
from distconv.process import patches
from tests.structure.modules import SOURCES

REPLACED_WHILE_NEEDED = {"distconv.communication.gradient_reduction": {"torch.nn.Parameter.grad"}}
"""Attributes of torch that others are put in the place of for a while, and taken away again."""


def test_every_patch_says_of_what_why_and_by_whom():
    targets = [patch.target for patch in patches.patches()]
    assert len(targets) == len(set(targets)) >= 18
    applied = "torch.autograd.function._SingleLevelFunction.apply"
    assert {"torch.compile", "torch.jit.trace", applied} <= set(targets)
    for patch in patches.patches():
        assert patch.why and patch.target.startswith("torch.") and patch.by.startswith("distconv."), patch


def test_a_torch_without_the_target_is_refused():
    place = types.ModuleType("torch.somewhere")
    with pytest.raises(dc.DistconvError, match=r"has no torch.somewhere.gone, which distconv replaces \(a reason\)"):
        patches.declare(place, "gone", print, "a reason")


def test_a_declared_patch_is_applied_at_the_start_and_another_one_at_once():
    place = types.ModuleType("torch.somewhere")
    place.here = place.there = 1
    before, callbacks = patches.patches(), list(patches._start_callbacks)
    try:
        patches.declare(place, "here", 2, "a reason")
        patches.replace(place, "there", 2, "a reason")
        assert (place.here, place.there) == (1, 2)
        patches.call_at_start(lambda: setattr(place, "called", True))
        assert not hasattr(place, "called")
        patches.apply.__wrapped__()
        assert place.here == 2 and place.called
        assert patches.patches()[-1].target == "torch.somewhere.there"
    finally:
        patches._PATCHES[:], patches._start_callbacks[:] = before, callbacks


EARLY = """
import torch
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / x.shape[0]

    @staticmethod
    def backward(ctx, grad):
        return grad / 3
half = Half.apply
import distconv as dc
own = torch.compile
grid = dc.ProcessGrid(n=2)
assert torch.compile is not own
x = dc.scatter(torch.tensor([3.0, 6.0, 9.0]), grid)
print(f"{half(x).tolist()}\\n", end="")  # one write: lines of ranks do not mix
"""


def test_a_function_that_was_bound_before_the_start_gets_full_tensors(mpiexec):
    ended = mpiexec(2, EARLY, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "[1.0, 2.0, 3.0]\n" * 2), ended.stderr


def test_nobody_assigns_to_torch_beside_the_table():
    wrong = []
    for module, path in SOURCES.items():
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        torchs = {
            (alias.asname or alias.name).split(".")[0]
            for node in imports
            for alias in node.names
            if (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0] == "torch"
        }
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                text = ast.unparse(target)
                known = text in REPLACED_WHILE_NEEDED.get(module, set())
                if isinstance(target, ast.Attribute) and text.split(".")[0] in torchs and not known:
                    wrong.append(f"{module}, line {node.lineno}: {text}")
    assert not wrong, "\n".join(wrong)


def test_what_is_replaced_still_does_what_torchs_does():
    with pytest.warns(DeprecationWarning):
        traced = torch.jit.trace(lambda x: x * 2, torch.ones(2))
    assert traced(torch.ones(2)).tolist() == [2, 2]

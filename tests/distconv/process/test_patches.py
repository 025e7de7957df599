"""What is replaced in torch: one table, and no assignment beside it."""

from __future__ import annotations

import ast
import types

import pytest
import torch

import distconv as dc
from distconv.process import patches
from tests.structure.modules import SOURCES

PLACES = ("torch.", "nn.", "checkpoint._", "_muon.")
REPLACED_WHILE_NEEDED = {"distconv.communication.gradient_reduction": {"torch.nn.Parameter.grad"}}
"""Attributes of torch that others are put in the place of for a while, and taken away again."""


def test_every_patch_says_of_what_why_and_by_whom():
    targets = [patch.target for patch in patches.patches()]
    assert len(targets) == len(set(targets)) >= 12
    assert {"torch.compile", "torch.jit.trace", "torch.autograd.function.Function.apply"} <= set(targets)
    for patch in patches.patches():
        assert patch.why and patch.target.startswith("torch.") and patch.by.startswith("distconv."), patch


def test_a_torch_without_the_target_is_refused():
    place = types.ModuleType("torch.somewhere")
    with pytest.raises(dc.DistconvError, match=r"has no torch.somewhere.gone, which distconv replaces \(a reason\)"):
        patches.replace(place, "gone", print, "a reason")


def test_what_was_there_is_handed_back():
    place = types.ModuleType("torch.somewhere")
    place.here = 1
    before = patches.patches()
    try:
        assert patches.replace(place, "here", 2, "a reason") == 1 and place.here == 2
        assert patches.patches()[-1].target == "torch.somewhere.here"
    finally:
        patches._PATCHES[:] = before


def test_nobody_assigns_to_torch_beside_the_table():
    wrong = []
    for module, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                text = ast.unparse(target)
                torchs = isinstance(target, ast.Attribute) and text.startswith(
                    ("torch.", "nn.", "checkpoint._", "_muon.")
                )
                if torchs and text not in REPLACED_WHILE_NEEDED.get(module, set()):
                    wrong.append(f"{module}, line {node.lineno}: {text}")
    assert not wrong, "\n".join(wrong)


def test_what_is_replaced_still_does_what_torchs_does():
    with pytest.warns(DeprecationWarning):
        traced = torch.jit.trace(lambda x: x * 2, torch.ones(2))
    assert traced(torch.ones(2)).tolist() == [2, 2]

"""Random numbers of a forward pass: of their own for each, the same again, and none of the caller's."""

from __future__ import annotations

import itertools

import torch

from distconv.pipeline.stage.rng import seed_generators


def draw_numbers(*numbers):
    with seed_generators(*numbers):
        return tuple(torch.rand(4).tolist())


def test_each_seed_mini_batch_micro_batch_and_stage_draws_its_own_and_again_the_same():
    every = list(itertools.product(range(3), repeat=4))
    found = [draw_numbers(*numbers) for numbers in every]
    assert len(set(found)) == len(every)
    assert [draw_numbers(*numbers) for numbers in every] == found


def test_what_is_drawn_within_changes_nothing_outside():
    torch.manual_seed(4)
    expected = torch.rand(6)
    torch.manual_seed(4)
    first = torch.rand(3)
    draw_numbers(1, 2, 3, 4)
    assert torch.equal(torch.cat([first, torch.rand(3)]), expected)

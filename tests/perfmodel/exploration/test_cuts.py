"""Cuts for one schedule: against all cuts there are, and the programs that the search begins with against theirs."""

from __future__ import annotations

import itertools
import random

import pytest

from distconv.perfmodel.exploration import cuts as cuts_module
from distconv.perfmodel.exploration.candidate_stages import ExplorationContext
from distconv.perfmodel.exploration.cuts import balanced_cuts, best_cuts, excess_and_time, least_memory_cuts
from distconv.perfmodel.machine.machine import Machine
from distconv.perfmodel.profiles.layer_profile import Layer, Profile
from distconv.perfmodel.stages.devices import Device


def random_stages(seed):
    rng = random.Random(seed)
    layers = [
        Layer(
            f"l{index}",
            time := rng.uniform(0.1, 1),
            time * rng.uniform(1.5, 2.5),
            rng.choice([0.1, 1, 10]) * rng.uniform(1, 3) * 1e10,
            rng.uniform(0, 1e9),
        )
        for index in range(9)
    ]
    device = Device("gpu", rng.randint(2, 4), None, rng.choice([1e15, rng.uniform(3e11, 9e11)]))
    setting = ExplorationContext(Profile(layers), Machine.load("lassen"), [device], 1)
    found = setting.pipeline_candidate(
        rng.choice(["1f1b-sno", "1f1b-so", "gpipe", "1f1b-as"]), 1, rng.choice([2, 4, 8, 16])
    )
    assert found is not None
    return found


def every_cut(stages):
    return [list(cuts) for cuts in itertools.combinations(range(1, stages.size), stages.count - 1)]


@pytest.mark.long
def test_cuts_that_are_searched_for_are_all_but_the_best_of_all():
    """The figures are those that cuts.py and docs/evidence/partitioning.md give."""
    fitting = optimal = 0
    for seed in range(300):
        stages = random_stages(seed)
        best, found = (
            min(excess_and_time(stages, cuts) for cuts in every_cut(stages)),
            excess_and_time(stages, best_cuts(stages)),
        )
        assert (found[0] > 0) == (best[0] > 0), "cuts fit where any do"
        if not best[0]:
            fitting += 1
            optimal += found[1] <= best[1] * (1 + 1e-12)
            assert found[1] <= 1.019 * best[1]
    assert (fitting, optimal) == (216, 212)


def slowest_stage(stages, cuts):
    """Seconds of the slowest stage."""
    seconds = [layer.time_s for layer in stages.context.profile.layers]
    return max(sum(seconds[first:last]) for first, last in itertools.pairwise([0, *cuts, stages.size]))


def highest_fraction_of_memory(stages, cuts):
    """The share of a device's memory that is taken where most of it is."""
    return max(held / room for held, room in zip(stages.memory(cuts), stages.memory_limits, strict=True))


@pytest.mark.parametrize("seed", range(100, 120))
def test_without_a_price_on_transfers_the_slowest_stage_that_fits_is_as_fast_as_can_be(seed):
    stages = random_stages(seed)
    fitting = [cuts for cuts in every_cut(stages) if highest_fraction_of_memory(stages, cuts) <= 1]
    found = balanced_cuts(stages)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert slowest_stage(stages, found) == pytest.approx(
            min(slowest_stage(stages, cuts) for cuts in fitting), rel=1e-12
        )


@pytest.mark.parametrize("seed", range(100, 120))
def test_the_emptiest_cuts_fill_the_fullest_stage_least(seed):
    stages = random_stages(seed)
    least = min(highest_fraction_of_memory(stages, cuts) for cuts in every_cut(stages))
    assert highest_fraction_of_memory(stages, least_memory_cuts(stages)) == pytest.approx(least, rel=1e-12)


def test_a_high_price_on_transfers_finds_the_small_boundary():
    sizes = [1e12, 1e12, 1e12, 1.0, 1e12, 1e12]
    layers = [Layer(f"l{index}", 1.0, 2.0, size, 0.0) for index, size in enumerate(sizes)]
    stages = ExplorationContext(
        Profile(layers), Machine.load("lassen"), [Device("gpu", 2, None)], 1
    ).pipeline_candidate("gpipe", 1, 4)
    assert stages is not None
    assert balanced_cuts(stages) == [3]
    assert balanced_cuts(stages, transfer_weight=2.0) == [4]


@pytest.mark.parametrize("start", [[2, 6], [4, 6], [3, 5], [3, 7]])
def test_each_cut_moves_to_where_the_stages_are_even(monkeypatch, start):
    monkeypatch.setattr(cuts_module, "TRANSFER_WEIGHTS", ())
    layers = [Layer(f"l{index}", 1.0, 2.0, 1.0, 1.0) for index in range(9)]
    stages = ExplorationContext(
        Profile(layers), Machine.load("lassen"), [Device("gpu", 3, None)], 1
    ).pipeline_candidate("1f1b-as", 1, 8)
    assert best_cuts(stages, [start]) == [3, 6]

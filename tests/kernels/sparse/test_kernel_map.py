"""Kernel maps against a dictionary of sites."""

from __future__ import annotations

import importlib
import itertools
import random

import pytest
import torch

from distconv.kernels.sparse import box_offsets, coarsen, kernel_map, sorting_order

kernel_maps = importlib.import_module("distconv.kernels.sparse.kernel_map")


def random_sites(seed, dimension, sites=40, reach=4):
    rng = random.Random(seed)
    rows = {(rng.randrange(3), *(rng.randint(-reach, reach) for _ in range(dimension))) for _ in range(sites)}
    rows = sorted(rows)
    rng.shuffle(rows)
    return torch.tensor(rows)


def by_dictionary(inputs, outputs, offset, unit):
    rows = {tuple(row): n for n, row in enumerate(inputs.tolist())}
    found = set()
    for n, (sample, *u) in enumerate(outputs.tolist()):
        site = (sample, *(c + unit * o for c, o in zip(u, offset, strict=True)))
        if site in rows:
            found.add((rows[site], n))
    return found


def pairs_of(found, k):
    inputs, outputs = found.pairs[k]
    return set(zip(inputs.tolist(), outputs.tolist(), strict=True))


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
@pytest.mark.parametrize("same", [True, False])
def test_a_map_has_the_pairs_that_a_dictionary_finds(same, dimension, unit):
    inputs = random_sites(1, dimension)
    outputs = inputs if same else random_sites(2, dimension, sites=30, reach=7)
    offsets = box_offsets((3, 2, 3, 1)[:dimension], (1, 0, 1, 0)[:dimension])
    found = kernel_map(inputs, outputs, offsets, unit, sorting_order(inputs))
    for k, offset in enumerate(offsets):
        assert pairs_of(found, k) == by_dictionary(inputs, outputs, offset, unit)
        assert all(len(rows.unique()) == len(rows) for rows in found.pairs[k])
    assert found.active_pairs == sum(len(inputs) for inputs, _ in found.pairs)
    assert (found.in_sites, found.out_sites) == (len(inputs), len(outputs))


def test_sorted_sites_need_no_order():
    inputs = coarsen(random_sites(3, 3), 1)
    offsets = box_offsets((3, 3, 3), (1, 1, 1))
    for ordered, plain in zip(
        kernel_map(inputs, inputs, offsets, 1, sorting_order(inputs)).pairs,
        kernel_map(inputs, inputs, offsets).pairs,
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(ordered, plain, strict=True))


def test_the_identity_is_that_of_a_submanifold_alone():
    inputs = random_sites(4, 2)
    offsets = ((1, 0), (0, 0))
    order = sorting_order(inputs)
    assert kernel_map(inputs, inputs, offsets, 1, order).identity == 1
    assert kernel_map(inputs, inputs.clone(), offsets, 1, order).identity is None
    assert kernel_map(inputs, inputs, offsets[:1], 1, order).identity is None
    inputs_of, outputs_of = kernel_map(inputs, inputs, offsets, 1, order).pairs[1]
    assert torch.equal(inputs_of, outputs_of) and torch.equal(inputs_of, torch.arange(len(inputs)))


def test_the_transposed_map_swaps_pairs_in_the_same_memory():
    inputs, outputs = random_sites(5, 3), random_sites(6, 3, sites=20)
    found = kernel_map(inputs, outputs, ((0, 0, 0), (0, 0, 1)), 1, sorting_order(inputs))
    back = found.transposed()
    assert (back.in_sites, back.out_sites, back.bytes) == (found.out_sites, found.in_sites, found.bytes)
    for (a, b), (c, d) in zip(found.pairs, back.pairs, strict=True):
        assert a is d and b is c


def test_bytes_count_pairs_that_mirrored_offsets_share_once():
    inputs = torch.tensor([[0, 0], [0, 1], [0, 2]])
    # One pair list for the centre (2 x 3 rows) and one for both neighbours (2 x 2 rows), of 8 bytes each.
    assert kernel_map(inputs, inputs, ((-1,), (0,), (1,))).bytes == (6 + 4) * 8


@pytest.mark.parametrize(("inputs", "outputs", "active"), [(0, 0, 0), (0, 3, 0), (3, 0, 0), (3, 3, 5)])
def test_empty_sets_have_maps(inputs, outputs, active):
    a, b = (
        torch.tensor([[0, n] for n in range(sites)], dtype=torch.long).reshape(-1, 2) for sites in (inputs, outputs)
    )
    assert kernel_map(a, b, ((0,), (1,))).active_pairs == active


def test_maps_between_sets_far_apart_are_empty():
    found = kernel_map(torch.tensor([[0, 0, 0]]), torch.tensor([[0, 1 << 30, 1 << 30]]), ((0, 0), (1, 1)))
    assert found.active_pairs == 0


def test_offsets_come_in_groups_of_as_many_pairs_as_are_worked_on_together(monkeypatch):
    inputs = random_sites(7, 2)
    found = kernel_map(inputs, inputs, box_offsets((3, 3), (1, 1)), 1, sorting_order(inputs))
    sizes = [len(outputs) for _, outputs in found.pairs]
    most = max(sizes) + 3
    monkeypatch.setattr(kernel_maps, "GROUP_PAIRS", most)
    groups = found.groups
    assert len(groups) > 2
    assert [k for group in groups for k in group.offsets] == list(range(9))
    assert [n for group in groups for n in group.sizes] == sizes
    assert all(sum(group.sizes) <= most for group in groups)
    # None could have had its successor's first offset as well.
    assert all(sum(a.sizes) + b.sizes[0] > most for a, b in itertools.pairwise(groups))


def test_only_offsets_that_come_in_mirrored_pairs_make_a_mirrored_map():
    line = torch.tensor([[0, n] for n in range(6)])
    assert kernel_map(line, line, ((-1,), (0,), (1,))).is_symmetric
    # As many pairs, but others: -1 and 1 in one order, and 2 and 2 in both directions.
    assert not kernel_map(line, line, ((1,), (0,), (1,))).is_symmetric
    assert not kernel_map(line, line.clone(), ((-1,), (0,), (1,))).is_symmetric
    assert not kernel_map(line, line, ((-1,), (1,))).is_symmetric

"""Windows: MONAI's places, weights and result, on any grid."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.data import BoxFunction, Field, Loader
from distconv.jobs.prediction.windows import Blend, WindowSource, blending_weights, window_starts
from tests.jobs.prediction.nets import volume_net

X = np.random.default_rng(5).standard_normal((2, 2, 12, 17, 9))
GRIDS = {2: ["d=2", "n=2"], 4: ["n=2,w=2", "h=4"]}


def of_windows(comm: Any, net: nn.Module, window: Any, overlap: float, batch: int, grid: Any, dtype: Any) -> Any:
    source = BoxFunction({"x": X.shape}, lambda name, box: X[box], comm)
    windows = WindowSource(source, "x", window, overlap)
    loader = Loader(windows, [Field("x", "ncdhw", dtype)], grid, batch, shuffle=False)
    model, found, blend = dc.parallelize(net, grid), [], None
    with torch.no_grad():
        for each in loader.epoch(0):
            outputs = model(each.tensors[0])
            for row, number in enumerate(each.samples):
                blend = blend or Blend(grid, windows.space, windows.window)
                blend.add(windows.places[number % len(windows.places)], outputs[row : row + 1])
                if (number + 1) % len(windows.places) == 0:
                    found.append(dc.gather(blend.result()))
                    blend = None
    return torch.cat(found)


def plain(net: nn.Module, window: Any, overlap: float, dtype: Any) -> Any:
    """One process, window by window, written another way: every weight whole."""
    lines = [window_starts(extent, w, overlap) for extent, w in zip(X.shape[2:], window, strict=True)]
    weight = blending_weights(window, [dc.Interval(0, w) for w in window], dtype)
    found = []
    for x in torch.from_numpy(X).to(dtype):
        total, count = 0.0, 0.0
        for place in itertools.product(*lines):
            pad = [(p, e - p - w) for p, w, e in zip(place, window, X.shape[2:], strict=True)]
            part = x[(slice(None), *(slice(p, p + w) for p, w in zip(place, window, strict=True)))]
            with torch.no_grad():
                y = net(part[None]) * weight
            sides = list(itertools.chain(*reversed(pad)))
            total, count = total + nn.functional.pad(y, sides), count + nn.functional.pad(weight, sides)
        found.append(total / count)
    return torch.cat(found)


@pytest.mark.long
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("window", "overlap", "batch"), [((8, 8, 9), 0.5, 1), ((5, 17, 4), 0.25, 3), ((12, 17, 9), 0.25, 2)]
)
def test_any_grid_gives_that_of_one_process(comm: Any, window: Any, overlap: float, batch: int) -> None:
    torch.manual_seed(0)
    net = volume_net().double().eval()
    expected = plain(net, window, overlap, torch.float64)
    for text in GRIDS[comm.size]:
        grid = dc.ProcessGrid(comm, **dc.parse_grid(text))
        found = of_windows(comm, net, window, overlap, batch, grid, torch.float64)
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("window", "overlap"), [((8, 8, 4), 0.25), ((5, 16, 9), 0.6), ((12, 17, 9), 0.5), ((3, 3, 3), 0)]
)
def test_it_is_monais_sliding_window_inference(window: Any, overlap: float) -> None:
    inferers = pytest.importorskip("monai.inferers", reason="needs the package monai")
    torch.manual_seed(0)
    net = volume_net().eval()
    x = torch.from_numpy(X).float()
    with torch.no_grad():
        expected = inferers.sliding_window_inference(x, window, 2, net, overlap=overlap, mode="gaussian")
    found = of_windows(MPI.COMM_SELF, net, window, overlap, 2, dc.ProcessGrid(MPI.COMM_SELF), torch.float32)
    assert (found - expected).abs().max() <= 1e-6


def test_windows_cover_a_sample_and_end_with_it() -> None:
    for extent, window, overlap in itertools.product((1, 7, 20), (1, 3, 7), (0.0, 0.5, 0.9)):
        window = min(window, extent)
        found = window_starts(extent, window, overlap)
        assert found[0] == 0 and found[-1] == extent - window and found == sorted(set(found))
        assert all(b - a <= max(1, int(window * (1 - overlap))) for a, b in itertools.pairwise(found))


def test_part_of_the_weights_is_that_part() -> None:
    whole = blending_weights((9, 20), [dc.Interval(0, 9), dc.Interval(0, 20)], torch.float64)
    part = blending_weights((9, 20), [dc.Interval(2, 5), dc.Interval(11, 20)], torch.float64)
    assert torch.equal(part, whole[2:5, 11:20])
    assert whole.min() >= 1e-3 and torch.equal(whole, whole.flip(0, 1)) and whole.argmax() in (4 * 20 + 9, 4 * 20 + 10)


def test_weights_and_windows_by_hand() -> None:
    """Windows of four and two rows: half a row from the middle is one standard deviation of one, two of the other."""
    four = torch.tensor([-4.5, -0.5, -0.5, -4.5]).exp()[:, None] * torch.tensor([-2.0, -2.0]).exp()
    found = blending_weights((4, 2), [dc.Interval(0, 4), dc.Interval(0, 2)], torch.float32)
    torch.testing.assert_close(found, four.clamp(min=max(float(four.min()), 1e-3)))
    assert found.min() > 1e-3
    wide = blending_weights((8, 8), [dc.Interval(0, 1), dc.Interval(0, 8)], torch.float64)
    assert wide.dtype == torch.float64 and wide.min() == pytest.approx(1e-3)
    numbers = np.arange(3 * 2 * 5 * 7).reshape(3, 2, 5, 7)
    source = BoxFunction(
        {"x": numbers.shape}, lambda name, box: numbers[tuple(slice(i.start, i.stop) for i in box)], MPI.COMM_SELF
    )
    windows = WindowSource(source, "x", (4, 9), 0.5)
    assert (windows.window, windows.space, windows.places) == ((4, 7), (5, 7), [(0, 0), (1, 0)])
    assert windows.shape("x") == (6, 2, 4, 7) and windows.chunks("x") == source.chunks("x")
    box = (dc.Interval(3, 4), dc.Interval(0, 2), dc.Interval(1, 3), dc.Interval(2, 7))
    assert np.array_equal(windows.read("x", box), numbers[1:2, :, 2:4, 2:])
    calls: list[str] = []
    windows.source = SimpleNamespace(close=lambda: calls.append("close"), check_unchanged=lambda: calls.append("check"))  # type: ignore[assignment]
    windows.check_unchanged()
    windows.close()
    assert calls == ["check", "close"]


def test_windows_are_blended_by_their_weights() -> None:
    """Three of five rows each, two channels: the one row of both is that of equal weights."""
    grid = dc.ProcessGrid(MPI.COMM_SELF)
    blend, layout = Blend(grid, (5, 4), (3, 4)), dc.Distribution(grid, (None, None, "h", None))
    for first, value in ((0, 1.0), (2, 3.0)):
        window = torch.full((1, 2, 3, 4), value, dtype=torch.float64)
        window[:, 1] *= 10
        blend.add((first, 0), dc.DistTensor(window, layout, (1, 2, 3, 4)))
    found = dc.gather(blend.result())
    assert found.dtype == torch.float64 and found.shape == (1, 2, 5, 4)
    expected = torch.tensor([1, 1, 2, 3, 3], dtype=torch.float64)[:, None].expand(5, 4)
    torch.testing.assert_close(found[0], torch.stack([expected, 10 * expected]))

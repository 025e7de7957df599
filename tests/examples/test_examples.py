"""The examples are ordinary scripts: over ranks they compute what the same lines compute as plain PyTorch.

For the plain run distconv's functions are replaced by ones that do nothing; both runs are in float64.
"""

from __future__ import annotations

import difflib
import runpy
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import distconv as dc
from distconv.layers import sparse

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SHORT = {
    "classify_distconv": "--epochs 1 --samples 24 --size 16 --batch 8 --grid",
    "classify_lightning": "--epochs 2 --samples 24 --size 16 --batch 8 --grid",
    "stop_and_go": "--steps 3 --size 16 --grid",
    "segment_3d": "--steps 2 --size 16 --grid",
    "fourier_flow": "--steps 2 --size 32 --flows 4 --grid",
    "lat_lon_forecast": "--steps 2 --longitudes 24 --grid",
    "climate_forecast": "--epochs 1 --times 20 --longitudes 24 --grid",
    "point_cloud": "--steps 2 --points 200 --voxels 12 --grid",
    "point_cloud_segmentation": "--steps 2 --shapes 3 --points 150 --voxels 12 --grid",
    "long_sequence": "--steps 2 --length 8192 --grid",
    "finite_differences": "--steps 3 --size 12 --grid",
    "neighbourhood_attention": "--steps 3 --size 16 --grid",
}
GRIDS = {
    "segment_3d": "d",
    "point_cloud": "d",
    "point_cloud_segmentation": "d",
    "lat_lon_forecast": "w",
    "long_sequence": "w",
}
"""The axis of space that an example's own command splits, where it is not h."""

PACKAGES = {"segment_3d": "monai", "classify_lightning": "lightning.pytorch"}
"""Further packages of an example."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path) -> Iterator[Any]:
    """Runs an example in this process, in float64, with a word for the grid; returns its variables."""
    monkeypatch.chdir(shared_tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the harness has its own
    before = torch.get_default_dtype(), torch.get_rng_state()

    def runs(name: str, grid: str = "") -> dict[str, Any]:
        words = SHORT.get(name, SHORT["classify_distconv"].removesuffix(" --grid")).split()
        monkeypatch.setattr(sys, "argv", [name, *words, *([grid] if grid else [])])
        torch.set_default_dtype(torch.float64)
        return runpy.run_path(str(EXAMPLES / f"{name}.py"))

    yield runs
    torch.set_default_dtype(before[0])
    torch.set_rng_state(before[1])


def without_distconv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what the examples use of distconv by what does nothing."""
    plain = types.ModuleType("distconv")
    plain.parse_grid = lambda _: {}  # type: ignore[attr-defined]
    plain.device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    plain.ProcessGrid = lambda *_, **__: types.SimpleNamespace(rank=0)  # type: ignore[attr-defined]
    plain.scatter = lambda x, *_, **__: x  # type: ignore[attr-defined]
    plain.gather = lambda x: x  # type: ignore[attr-defined]
    plain.parallelize = lambda model, _: model  # type: ignore[attr-defined]
    plain.rule, plain.Window = dc.rule, dc.Window  # type: ignore[attr-defined]  # of plain tensors: one process
    plain.load_checkpoint = lambda *_, **__: None  # type: ignore[attr-defined]
    plain.save_checkpoint = lambda *_, **__: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distconv", plain)
    monkeypatch.setattr(sparse, "scatter", lambda x, _: x)
    monkeypatch.setattr(sparse, "gather", lambda x: x)


def check_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    torch.testing.assert_close(ours["losses"], plain["losses"], rtol=1e-9, atol=1e-12)
    expected = plain["model"].state_dict()
    assert expected
    for name, value in ours["model"].state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # Lightning's, with torch 2.13
@pytest.mark.parametrize("name", [name for name in SHORT if name != "climate_forecast"])
def test_ranks_compute_what_plain_torch_does(comm: Any, name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"needs the package {PACKAGES[name]}")
    ours = run(name, f"{GRIDS.get(name, 'h')}=2")
    split = any(isinstance(value, dc.DistTensor) for value in ours.values())
    assert split or name in ("point_cloud", "classify_lightning")  # whose tensors live in functions
    with monkeypatch.context() as patched:
        without_distconv(patched)
        plain = run(name, "none")
    assert not any(isinstance(value, dc.DistTensor) for value in plain.values())
    check_equal(ours, plain)


@pytest.mark.ranks(4)
def test_a_forecast_on_a_grid_is_that_of_ranks_with_all_of_it(comm: Any, run: Any, shared_tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("zarr")
    found = {}
    for grid in ("h=2,w=2", "r=4"):
        values = run("climate_forecast", grid)
        comm.Barrier()
        with xarray.open_zarr(shared_tmp_path / "forecast.zarr") as written:
            found[grid] = values["losses"], values["forecast"].shape, written.load()
        comm.Barrier()
    (losses, shape, forecast), (expected, _, alone) = found.values()
    assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-9)
    xarray.testing.assert_allclose(forecast, alone, rtol=1e-7)
    assert forecast["z"].shape == (shape[0], 3, *shape[2:]) and forecast["sst"].attrs == {"units": "K"}
    stored = xarray.open_zarr(shared_tmp_path / "climate.zarr", consolidated=False)
    for name, values in forecast.coords.items():
        assert values.equals(stored[name][1 : 1 + shape[0]] if name == "time" else stored[name]), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grid", ["n=2", "h=2"])
def test_the_ported_script_trains_as_the_one_with_ddp(
    comm: Any, run: Any, grid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.bcast(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for variable, value in {**address, "RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_RANK": comm.rank}.items():
        monkeypatch.setenv(variable, str(value))
    ddp = run("classify_ddp")
    ours = run("classify_distconv", grid)
    means = [sum(values) / comm.size for values in zip(*comm.allgather(ddp["losses"]), strict=True)]
    check_equal(ours, {"losses": means, "model": ddp["model"].module})


def test_porting_changes_twelve_lines() -> None:
    before, after = (
        [line for line in text.split('"""', 2)[2].splitlines() if line]
        for text in ((EXAMPLES / f"classify_{name}.py").read_text() for name in ("ddp", "distconv"))
    )
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")
    assert 8 < changed <= 12

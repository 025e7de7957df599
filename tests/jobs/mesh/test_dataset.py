"""The mesh-tangling data set: its file, how ranks share its runs, and mirror images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh import dataset
from distconv.jobs.mesh.dataset import CHANNELS, Recipe, flip, generate
from distconv.jobs.mesh.hydro.initial_conditions import CELLS_PER_UNIT, FAMILIES, initial_condition
from distconv.jobs.mesh.hydro.solver import Hydro
from distconv.jobs.mesh.hydro.state import State
from distconv.jobs.mesh.production import production
from distconv.jobs.mesh.production.channels import sample_channels
from distconv.jobs.mesh.production.cost import step_cost
from distconv.jobs.mesh.production.parts import Parts, streams
from distconv.jobs.mesh.production.run import Criteria, perform_run, run_seed

SIZE = 32


def content(path: Path) -> dict[str, Any]:
    """All datasets and attributes of a file by name."""
    found: dict[str, Any] = {}
    with h5py.File(path, "r") as file:
        found |= {f"@{key}": str(value) for key, value in file.attrs.items()}

        def visit(name: str, thing: h5py.Group | h5py.Dataset) -> None:
            found.update({f"{name}@{key}": value for key, value in thing.attrs.items()})
            if isinstance(thing, h5py.Dataset):
                found[name] = thing[...]

        file.visititems(visit)
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set made on one rank."""
    path = tmp_path_factory.mktemp("mesh") / "mesh.h5"
    generate(path, size=SIZE, samples=7, heldout=5, seed=3, progress=False)
    return path


def test_a_file_has_the_layout_that_training_reads(small: Path) -> None:
    with h5py.File(small, "r") as file:
        assert list(file.attrs["channels"]) == list(CHANNELS)
        assert (file.attrs["tau"], file.attrs["threshold"], file.attrs["cell_size"]) == (0.1, 0.4, 1 / 128)
        assert 0.0 <= file.attrs["rejection_rate"] < 1.0
        for name, count in (("train", 7), ("heldout", 5)):
            group = file[name]
            assert group["input"].shape == (count, 18, SIZE, SIZE)
            assert group["input"].dtype == group["extrapolated"].dtype == np.float32
            assert group["label"].shape == group["extrapolated"].shape == (count, SIZE, SIZE)
            assert group["label"].dtype == np.uint8
            assert group["input"].chunks == (1, 18, 8, 8)
            assert all(group[key].fletcher32 for key in ("input", "label", "extrapolated"))
            assert np.isfinite(group["input"][...]).all()
            assert set(np.unique(group["label"][...])) == {0, 1}
            np.testing.assert_allclose(group["positives"][...], group["label"][...].mean((1, 2)))
            assert group.attrs["positive_fraction"] == pytest.approx(group["label"][...].mean())
            assert {name.decode() for name in group["family"][...]} == set(FAMILIES)


def test_training_and_held_out_samples_never_share_a_run(small: Path) -> None:
    with h5py.File(small, "r") as file:
        train, heldout = file["train/run"][...], file["heldout/run"][...]
        assert not set(train) & set(heldout)
        assert max(np.unique(np.concatenate([train, heldout]), return_counts=True)[1]) <= 2
        times = file["train/t"][...]
        for run in np.unique(train):
            gaps = np.diff(np.sort(times[train == run]))
            assert (gaps >= 0.05 - 1e-12).all()


def test_labels_contain_what_is_bad_already(small: Path) -> None:
    with h5py.File(small, "r") as file:
        minimum = file["train/input"][:, CHANNELS.index("minimum Jacobian")]
        assert (file["train/label"][...][minimum < 0.4] == 1).all()
        assert (file["train/extrapolated"][...] <= minimum).all()
        assert (np.mean(minimum < 0.25, axis=(1, 2)) < 0.03).all()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.time_limit(120)
def test_any_number_of_ranks_makes_the_same_file(comm: Any, shared_tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"size": SIZE, "samples": 4, "heldout": 2, "seed": 3, "progress": False}
    together = generate(shared_tmp_path / "together.h5", comm=comm, **arguments)
    alone = generate(shared_tmp_path / f"alone-{comm.rank}.h5", **arguments)
    assert together.samples == alone.samples == 4
    assert_same(content(shared_tmp_path / "together.h5"), content(shared_tmp_path / f"alone-{comm.rank}.h5"))


def test_an_interrupted_generation_goes_on_where_it_stopped(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mesh.h5"
    done: list[Any] = []

    def interrupted(*arguments: Any) -> Any:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(arguments)
        return perform_run(*arguments)

    monkeypatch.setattr(production, "perform_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(path, size=SIZE, samples=7, heldout=5, seed=3, progress=False)
    assert not path.exists()
    # The first of these only warmed up the compiler.
    assert len(list((tmp_path / "mesh.h5.parts").glob("*.npz"))) == 3

    resumed: list[Any] = []

    def counted(*arguments: Any) -> Any:
        resumed.append(arguments)
        return perform_run(*arguments)

    monkeypatch.setattr(production, "perform_run", counted)
    summary = generate(path, size=SIZE, samples=7, heldout=5, seed=3, progress=False)
    assert len(resumed) - 1 == summary.runs - 3
    assert_same(content(path), content(small))
    assert not (tmp_path / "mesh.h5.parts").exists()


def test_a_complete_file_is_left_as_it_is(small: Path) -> None:
    before = small.read_bytes()
    summary = generate(small, size=SIZE, samples=7, heldout=5, seed=3, progress=False)
    assert (summary.samples, summary.heldout) == (7, 5)
    assert small.read_bytes() == before


def test_a_file_with_other_content_is_not_overwritten(small: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mesh\.h5: exists and is not the data set asked for"):
        generate(small, size=SIZE, samples=8, heldout=5, seed=3, progress=False)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(DataError, match="remove it or choose another name"):
        generate(tmp_path / "notes", size=SIZE, samples=1, progress=False)
    assert (tmp_path / "notes").read_text() == "mine"


def test_parts_of_another_recipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5.parts").mkdir()
    (tmp_path / "a.h5.parts" / "recipe.json").write_text('{"size": 64}')
    with pytest.raises(DataError, match="holds runs with size = 64 where 32 is asked for"):
        generate(tmp_path / "a.h5", size=SIZE, samples=1, progress=False)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "x", per_run=2)
    run = streams(1, 0)[0].run(0)
    parts.file(run).write_bytes(b"not a run")
    with pytest.raises(DataError, match=r"train-taylor-green-00000\.npz: damaged"):
        parts.accepted(run)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used"):
        generate(tmp_path / "file" / "mesh.h5", size=SIZE, samples=1, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 0}, "size 0: a mesh needs at least 16 cells"),
        ({"samples": 0}, "0 samples and 1 held out"),
        ({"heldout": -1}, "5 samples and -1 held out"),
        ({"tau": 0.0}, "tau 0.0: the time"),
        ({"threshold": 1.5}, "threshold 1.5: a scaled Jacobian"),
        ({"seed": -1}, "seed -1: a seed is not negative"),
    ],
)
def test_senseless_arguments_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"size": 64, "samples": 5, "heldout": 1} | change
    with pytest.raises(DataError, match=message):
        generate(tmp_path / "mesh.h5", progress=False, **arguments)


def test_a_stream_that_gives_nothing_ends_with_an_error(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "x", per_run=2, most_runs=2)
    criteria = Criteria(least_labelled=1.1, last_time=0.1)
    with pytest.raises(DataError, match="2 runs of 'taylor-green' gave 0 samples where 1 are wanted"):
        production.produce(parts, streams(1, 0), size=16, seed=0, criteria=criteria, comm=None, progress=False)


def test_samples_are_shared_evenly_between_families() -> None:
    wanted = streams(48, 16)
    assert [stream.quota for stream in wanted if stream.split == 0] == [10, 10, 10, 9, 9]
    assert [stream.quota for stream in wanted if stream.split == 1] == [4, 3, 3, 3, 3]


def test_the_recipe_of_a_run_does_not_contain_the_number_of_samples() -> None:
    assert Recipe(64, 1, 0, 0.1, 0.4, 0).of_a_run() == Recipe(64, 9, 3, 0.1, 0.4, 0).of_a_run()


# Mirror images


def mirror(state: State, side: float, axis: str) -> State:
    """The state seen in a mirror across the middle of the domain."""
    along = 1 if axis == "w" else 0
    x, y, u, v, energy = (np.flip(array, along).copy() for array in state)
    return State(side - x, y, -u, v, energy) if axis == "w" else State(x, side - y, u, -v, energy)


@pytest.mark.parametrize("axis", ["h", "w"])
def test_a_flipped_sample_is_the_sample_of_the_mirrored_flow(axis: str) -> None:
    hydro = Hydro(initial_condition("triple-point", SIZE, run_seed(5, 0, 3, 0)))
    hydro.run(0.08)
    gas, along = hydro.gas, 1 if axis == "w" else 0
    mirrored_gas = gas._replace(
        mass=np.flip(gas.mass, along).copy(),
        gamma=np.flip(gas.gamma, along).copy(),
        volume0=np.flip(gas.volume0, along).copy(),
    )
    channels = sample_channels(hydro.state, gas, hydro.coefficients)
    mirrored_state = mirror(hydro.state, SIZE / CELLS_PER_UNIT, axis)
    expected = sample_channels(mirrored_state, mirrored_gas, hydro.coefficients)
    label = (channels[12] < 0.9).astype(np.uint8)
    flipped, flipped_label = flip(channels, label, axis)
    np.testing.assert_allclose(flipped, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(flipped_label, np.flip(label, along))
    # Each sign matters: these channels are not near zero.
    for name in ("velocity u", "velocity v", "vorticity", "skew"):
        assert np.abs(channels[CHANNELS.index(name)]).max() > 0.01


def test_flipping_twice_gives_the_sample_back_and_batches_flip_as_one() -> None:
    rng = np.random.default_rng(0)
    channels, label = rng.normal(size=(3, 18, 5, 7)), rng.integers(0, 2, (3, 5, 7))
    for axis in "hw":
        again = flip(*flip(channels, label, axis), axis)
        np.testing.assert_array_equal(again[0], channels)
        np.testing.assert_array_equal(again[1], label)
        np.testing.assert_array_equal(flip(channels, label, axis)[0][1], flip(channels[1], label[1], axis)[0])
    with pytest.raises(ValueError, match="an image has the axes 'h' and 'w'"):
        flip(channels, label, "d")


# Cost


def test_the_cost_of_a_step_is_reported() -> None:
    cost = step_cost(32, 2)
    assert cost.seconds_per_step > 0.0 and cost.peak_memory_bytes > 1e6
    assert cost.projected_seconds == pytest.approx(cost.seconds_per_step * cost.projected_steps)
    assert "32 x 32 cells, 2 steps measured" in str(cost)
    assert dataset.step_cost(32, 1).steps == 1
    with pytest.raises(DataError, match="size 32, 0 steps"):
        step_cost(32, 0)

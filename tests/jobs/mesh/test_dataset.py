"""The mesh-tangling data set: existing files, parts of interrupted jobs, arguments, and mirror images of samples."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from distconv.errors import DataError
from distconv.jobs.mesh import dataset
from distconv.jobs.mesh.dataset import CHANNELS, MeshRecipe, Summary, flip, generate, transpose
from distconv.jobs.mesh.production.run import Criteria
from distconv.whole_files import PARTIAL
from tests.jobs.mesh.mesh_files import SIZE

pytestmark = pytest.mark.time_limit(240)  # the first that comes compiles the kernels


def test_parts_of_another_recipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5.parts").mkdir()
    (tmp_path / "a.h5.parts" / "recipe.json").write_text('{"size": 64}')
    with pytest.raises(DataError, match="holds simulations with size = 64, but 32 is requested"):
        generate(tmp_path / "a.h5", size=SIZE, samples=1, progress=False)
    (tmp_path / "a.h5.parts" / "recipe.json").write_text("[64]")
    with pytest.raises(DataError, match=r"recipe\.json: found a list, expected a mapping"):
        generate(tmp_path / "a.h5", size=SIZE, samples=1, progress=False)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot hold the simulations of"):
        generate(tmp_path / "file" / "mesh.h5", size=SIZE, samples=1, progress=False)


def test_what_a_killed_job_has_left_is_removed_and_finished_runs_stay(tmp_path: Path) -> None:
    recipe, target = MeshRecipe(SIZE, 7, 2, tau=0.3, threshold=0.4, seed=0), tmp_path / "new" / "a.h5"
    first = dataset.prepare_parts(target, recipe)
    folder = tmp_path / "new" / "a.h5.parts"
    assert json.loads((folder / "recipe.json").read_text()) == recipe.of_a_run()
    kept = ["recipe.json", "train-shear-00000.npz"]
    for name in (kept[1], "train-shear-00001.claim-ab", "alarm-ab", f"x{PARTIAL}"):
        (folder / name).touch()
    second = dataset.prepare_parts(target, replace(recipe, samples=9))
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert first != second and len(first) == len(second) == 8


def test_all_arguments_reach_the_production_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    made = Summary("x", 16, 1, 2, 3, 4, 0.5, {}, 5, 0.1, 0.2, 0.3, 6)

    def produce(parts: Any, wanted: Any, **options: Any) -> None:
        seen.append((parts.folder, parts.per_run, [stream.quota for stream in wanted], options))

    def assemble(target: Path, recipe: MeshRecipe, parts: Any, wanted: Any) -> Summary:
        seen.append((target, asdict(recipe), parts.folder, len(wanted)))
        return made

    monkeypatch.setattr("distconv.jobs.mesh.production.production.produce", produce)
    monkeypatch.setattr("distconv.jobs.mesh.production.datafile.assemble", assemble)
    clock = iter((2.0, 5.0))
    monkeypatch.setattr(dataset, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    target = tmp_path / "a.h5"
    options: dict[str, Any] = {"progress": False, "on_first_sample": print}
    found = generate(target, size=SIZE, samples=7, tau=0.2, threshold=0.6, seed=4, **options)
    assert found == replace(made, seconds=3.0)
    recipe = {"size": SIZE, "samples": 7, "heldout": 2, "tau": 0.2, "threshold": 0.6, "seed": 4, "version": 2}
    folder = tmp_path / "a.h5.parts"
    criteria = Criteria(tau=0.2, threshold=0.6)
    options |= {"size": SIZE, "seed": 4, "criteria": criteria, "comm": None}
    assert seen == [(folder, 2, [2, 2, 1, 1, 1, 1, 1], options), (target, recipe, folder, 7)]
    monkeypatch.setattr("distconv.jobs.mesh.production.cost.step_cost", lambda size, steps: (size, steps))
    assert dataset.step_cost(64, 3) == (64, 3)


def test_a_complete_file_stays_as_it_is_and_another_one_is_refused(tmp_path: Path) -> None:
    """By default, a third as many held-out samples are made."""
    made = MeshRecipe(SIZE, 7, 2, tau=0.3, threshold=0.4, seed=0)
    figures = dict.fromkeys(
        ("runs", "candidates", "inversions", "steps", "rejection_rate", "positive_fraction", "positive_fraction_train",
         "positive_fraction_heldout"), 1
    )  # fmt: skip
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["recipe"] = json.dumps(asdict(made))
        file.attrs["summary"] = json.dumps({"size": SIZE, "samples": 7, "heldout": 2, "rejected": {}, **figures})
    before = (tmp_path / "x.h5").read_bytes()
    assert generate(tmp_path / "x.h5", size=SIZE, samples=7, progress=False).heldout == 2
    with pytest.raises(DataError, match=r"x\.h5: exists with different options"):
        generate(tmp_path / "x.h5", size=SIZE, samples=8, progress=False)
    assert (tmp_path / "x.h5").read_bytes() == before
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(DataError, match="Remove it or choose another name"):
        generate(tmp_path / "notes", size=SIZE, samples=1, progress=False)
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("turn", "places", "changed"),
    [
        (lambda x: flip(x, x[..., 0, :, :], "h"), lambda j, i: (3 - j, i), {"velocity v", "vorticity", "skew"}),
        (lambda x: flip(x, x[..., 0, :, :], "w"), lambda j, i: (j, 3 - i), {"velocity u", "vorticity", "skew"}),
        (lambda x: transpose(x, x[..., 0, :, :]), lambda j, i: (i, j), {"vorticity", "log aspect ratio"}),
    ],
    ids=["h", "w", "diagonal"],
)
def test_what_changes_its_sign_in_a_mirror(turn, places, changed) -> None:  # type: ignore[no-untyped-def]
    sample = np.random.default_rng(0).normal(size=(18, 4, 4))
    mirrored, label = turn(sample)
    from_where = {"velocity u": "velocity v", "velocity v": "velocity u"} if len(changed) == 2 else {}
    for channel, name in enumerate(CHANNELS):
        source = CHANNELS.index(from_where.get(name, name))
        for j, i in np.ndindex(4, 4):
            assert mirrored[(channel, *places(j, i))] == (-1 if name in changed else 1) * sample[source, j, i]
    assert label[places(1, 2)] == sample[0, 1, 2]

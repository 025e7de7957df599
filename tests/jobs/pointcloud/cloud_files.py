"""Small files of point clouds and meshes in all formats that are read, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

CUBE = "8 6 12\n" + "".join(f"{x} {y} {z}\n" for x in (0, 1) for y in (0, 1) for z in (0, 1))
CUBE += "4 0 1 3 2\n4 4 6 7 5\n4 0 4 5 1\n4 2 3 7 6\n4 0 2 6 4\n4 1 5 7 3\n"
"""The unit cube as an OFF file says it behind its header: six squares."""


def off(vertices: Sequence[Sequence[float]], faces: Sequence[Sequence[int]], header: str = "OFF\n") -> str:
    """The text of an OFF file."""
    lines = [f"{header}{len(vertices)} {len(faces)} 0"]
    lines += [" ".join(map(str, vertex)) for vertex in vertices]
    lines += [" ".join(map(str, (len(face), *face))) for face in faces]
    return "\n".join(lines) + "\n"


def write_modelnet(folder: Path, train: int = 2, test: int = 1) -> None:
    """Boxes of two classes, glued headers among them; one rank calls this."""
    for name, stretch in (("box", 1.0), ("plank", 5.0)):
        for group, count in (("train", train), ("test", test)):
            (folder / name / group).mkdir(parents=True)
            for number in range(count):
                text = CUBE.replace("1 1 1\n", f"{stretch} {1 + number} 1\n")
                header = "OFF" if number else "OFF\n"
                (folder / name / group / f"{name}_{number:04}.off").write_text(header + text)


def write_ours(path: Path, *, parts: bool = True, **replaced: Any) -> dict[str, Any]:
    """A file of 5 training and 2 test clouds of 30 points, with other training datasets; one rank calls this."""
    made = {}
    with h5py.File(path, "w") as file:
        file.attrs["class_names"] = ["a", "b", "c"]
        if parts:
            file.attrs["part_names"] = ["left", "right"]
        for group, count in (("train", 5), ("test", 2)):
            random = np.random.default_rng(count)
            made[group] = {
                "points": random.normal(size=(count, 30, 3)).astype(np.float32),
                "label": np.arange(count) % 3,
            }
            if parts:
                made[group]["part"] = (made[group]["points"][:, :, 0] > 0).astype(np.uint8)
            if group == "train":
                made[group].update(replaced)
            for name, values in made[group].items():
                file[f"{group}/{name}"] = values
    return made


def write_quantised(path: Path) -> Any:
    """A file of 4 quantised clouds of 20 points; returns where the points are. One rank calls this."""
    random = np.random.default_rng(1)
    q, offset, extent = random.integers(0, 4096, (4, 20, 3)), random.normal(size=(4, 3)), np.array([1.0, 2, 3, 4])
    with h5py.File(path, "w") as file:
        file.attrs["class_names"] = np.array(["x", "y"], dtype=object)
        file["train/q"] = q.astype(np.uint16)
        file["train/offset"], file["train/extent"] = offset.astype(np.float32), extent.astype(np.float32)
        file["train/label"] = np.array([0, 1, 1, 0], np.uint8)
    return offset[:, None] + q / 4095 * extent[:, None, None]

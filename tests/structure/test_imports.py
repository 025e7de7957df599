"""Who imports whom: the order of dependence between folders and within them, and the refusal of bare imports."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.structure.modules import ALL_IMPORTS, BELOW, OURS, ROOT, SOURCES, folder_of

CORE_EXCEPTIONS = {("distconv", "layers")}
"""``distconv`` fills its operator registry when it is imported. (The command line loads jobs in a function.)"""


WITHIN = {
    "distconv": ["autograd communication parameters process", "checkpoint data tracing", "capture"],
    "distconv.layers": ["common", "rules", "recurrent sparse", "models", "math", "tensor", "nn"],
    "distconv.perfmodel": ["graph", "cost machine strategy", "profiles", "sparse", "stages", "exploration"],
    "distconv.pipeline": ["schedules simulation", "runtime splitting stage", "reference"],
    "distconv.jobs": [
        "configuration",
        "training",
        "images mesh pointcloud segmentation sequence",
        "bench commands planning prediction verification",
        "papers",
    ],
}
"""The packages within each folder, lowest first; those on one line have an order among themselves."""


def test_folders_import_only_what_lies_below_them() -> None:
    """In functions too: a lazy import upwards is still a circle."""
    wrong = []
    for entry in OURS:
        here, there = folder_of(entry.module), folder_of(entry.target)
        if here is not None and there not in (None, here) and there not in BELOW[here]:
            wrong.append(str(entry))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", WITHIN)
def test_packages_within_a_folder_import_only_what_lies_below_them(folder: str) -> None:
    height = {f"{folder}.{name}": level for level, names in enumerate(WITHIN[folder]) for name in names.split()}
    packages = {
        name for name, path in SOURCES.items() if path.name == "__init__.py" and name.rpartition(".")[0] == folder
    }
    assert set(height) == packages - {f"distconv.{name}" for name in BELOW}
    wrong = []
    for entry in OURS:
        here, there = (
            height.get(".".join(name.split(".")[: folder.count(".") + 2])) for name in (entry.module, entry.target)
        )
        if here is not None and there is not None and there > here:
            wrong.append(str(entry))
    assert not wrong, "\n".join(wrong)


def test_no_two_packages_import_each_other() -> None:
    """Nor a package and one far below it: the folders of a storey have an order of dependence, too."""
    imports: dict[tuple[str, str], list[str]] = {}
    for entry in OURS:
        here, there = (
            name if SOURCES[name].name == "__init__.py" else name.rpartition(".")[0]
            for name in (entry.module, entry.target)
        )
        nested = f"{here}.".startswith(f"{there}.") or f"{there}.".startswith(f"{here}.")
        if not nested and folder_of(here) == folder_of(there):
            imports.setdefault((here, there), []).append(str(entry))
    mutual = [entry for (here, there), entries in imports.items() if (there, here) in imports for entry in entries]
    assert not mutual, "\n".join(mutual)


def test_the_core_imports_no_folder_at_import_time() -> None:
    wrong = []
    for entry in OURS:
        there = folder_of(entry.target)
        if (
            folder_of(entry.module) is None
            and there
            and entry.at_import
            and (entry.module, there) not in CORE_EXCEPTIONS
        ):
            wrong.append(str(entry))
    assert not wrong, "\n".join(wrong)


def test_kernels_never_import_mpi4py() -> None:
    wrong = [str(e) for e in ALL_IMPORTS if folder_of(e.module) == "kernels" and e.target.split(".")[0] == "mpi4py"]
    assert not wrong, "\n".join(wrong)


def test_no_module_names_a_folder_by_its_bare_name() -> None:
    wrong = [str(entry) for entry in ALL_IMPORTS if entry.target.split(".")[0] in BELOW]
    assert not wrong, "\n".join(wrong)


def test_modules_import_each_other_in_no_circle() -> None:
    """In functions and for types, too."""
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for entry in OURS:
        if entry.target != entry.module and entry.target in SOURCES:
            graph[entry.module].add(entry.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_bare_import_of_a_folder_raises() -> None:
    code = f"""
for folder in {sorted(BELOW)}:
    try:
        __import__(folder)
    except ImportError as error:
        print(folder, error)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for folder, line in zip(sorted(BELOW), ended.stdout.splitlines(), strict=True):
        assert line.startswith(folder) and f"import this package as distconv.{folder}" in line


CREATED = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Printing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        print(function)
        return function(*args, **(kwargs or {}))

with Printing():
    import distconv, distconv.pipeline, distconv.kernels.jacobian.csr
"""


def test_importing_distconv_creates_no_tensor() -> None:
    """torch selects the size of memory pages at its first tensor; until then distconv can ask for large ones."""
    found = subprocess.run([sys.executable, "-c", CREATED], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == ""

"""Files are written in one way, which leaves no half ones, follows no link and names what could not be written."""

from __future__ import annotations

import re

from tests.structure.modules import ROOT, SOURCES

OTHER_WAYS = re.compile(
    r"""\.write_(text|bytes)\("""
    r"""|\bopen\(([^()]*, )?"(?=[rb+]*[wax+])[rwaxbt+]+\""""
    r"""|\.savefig\((?!image\b)"""
    r"""|torch\.save\([^()]*\b(path|out)\b"""
    r"""|h5py\.File\([^()]*"[wa]\""""
)

REASONS = {
    "distconv/checkpoint/files.py": "HDF5 lays out memory",
    "distconv/writing.py": "HDF5 in memory: a virtual dataset, which has no values",
    "distconv/whole_files.py": "the one way",
    "jobs/bench/child_processes.py": "asks the system to count the peak anew",
    "jobs/bench/steps/safeguards.py": "times a raw write",
    "jobs/mesh/production/datafile.py": "HDF5 in memory",
    "jobs/verification/soak.py": "damages a file",
}


def test_files_are_written_by_one_module() -> None:
    others = {str(path.relative_to(ROOT)) for path in SOURCES.values() if OTHER_WAYS.search(path.read_text())}
    assert others <= set(REASONS), sorted(others - set(REASONS))


def test_what_is_written_otherwise_is_found() -> None:
    for text in (
        'Path(path).write_text("x")',
        'open(path, "w")',
        'path.open("wb")',
        'path.open("rb+")',
        "figure.savefig(path, dpi=110)",
        "torch.save(state, out)",
        'h5py.File(path, "w")',
    ):
        assert OTHER_WAYS.search(text), text
    for text in ('open(path, "rb")', 'path.open("r")', "figure.savefig(image)", "torch.save(state, image)"):
        assert not OTHER_WAYS.search(text), text

"""Tests against one mutation of a copy of the checkout: doctests, the file that mirrors the module, then its folder.

All tests of the mirror file run, and of the folder those of the short run, which takes minutes instead of a quarter of
an hour.
"""

from __future__ import annotations

import compileall
import contextlib
import functools
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.harness import launch, selection
from tests.mutation.drawing import Mutation

SHARES = {"doctests": "--full", "mirror": "--full", "folder": "--short"}
"""Share of the tests of each stage. A case that names no rank count runs on one of them."""
SIGNS = re.compile(r"^FAILED, |behind the test that stopped the job", re.MULTILINE)
"""Text that tests/run.py prints at a failure. The run is stopped there."""
DOCTESTS = "tests/structure/test_docstrings.py::test_examples_in_docstrings_are_right"
RANKS = re.compile(r"^== (serial|\d+)", re.MULTILINE)
TEST = re.compile(r"(tests/[\w/]+\.py)(?:(?:::|:\d+: in )(test_\w+))?")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "_build")
NO_TESTS = 5


class Failure(NamedTuple):
    """A failed stage: its first failing test or the time limit, and the arguments that repeat it."""

    reason: str
    arguments: tuple[str, ...]


class Finding(NamedTuple):
    """The outcome of a mutation: noticed by "doctests", "mirror" or "folder", or "survived" or "unclear"."""

    outcome: str
    reason: str = ""
    seconds: float = 0.0


def copy_of(root: Path, place: Path) -> Path:
    """Copy a checkout into an empty folder."""
    copy = place / "checkout"
    shutil.copytree(root, copy, symlinks=True, ignore=NOT_COPIED)
    if (root.parent / "shared").exists():
        (place / "shared").symlink_to(root.parent / "shared")  # sample data that some tests read
    compileall.compile_dir(copy, quiet=2)
    return copy


@contextlib.contextmanager
def replaced(module: Path, text: str) -> Iterator[None]:
    """Give a module of a copy another text for a while."""
    original = module.read_text()
    module.write_text(text)
    try:
        forget_compiled(module)
        yield
    finally:
        module.write_text(original)
        forget_compiled(module)


def forget_compiled(module: Path) -> None:
    """Remove bytecode of the module, and the kernels of its folder that numba stored.

    Python compares the seconds and the size of a source file, which can be equal. numba compares the file of a kernel
    but not those of the kernels that it calls.
    """
    compiled = (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc")
    for path in (*module.parent.rglob("*.nb[ic]"), *compiled):
        path.unlink()


def try_out(copy: Path, mutation: Mutation, limit_s: float) -> Finding:
    """Run the tests with a mutation, until a stage fails.

    A failure counts if the same tests pass without the mutation, in at most half of the time limit. This holds for a
    stage that exceeds the limit, too.
    """
    started = time.monotonic()
    for stage, arguments in stages(copy, mutation.path).items():
        with replaced(copy / mutation.path, mutation.mutated):
            failure = run(copy, arguments, limit_s)
        if failure is not None:
            seconds = time.monotonic() - started
            noticed = passes(copy, failure.arguments, limit_s / 2)
            return Finding(stage if noticed else "unclear", failure.reason, seconds)
    return Finding("survived", seconds=time.monotonic() - started)


def stages(copy: Path, path: str) -> dict[str, tuple[str, ...]]:
    """Return the arguments of tests/run.py for the doctests, the mirror file and the other files of its folder.

    A stage without tests is left out. Where a folder has no test files, its subfolders count.
    """
    mirror = copy / "tests" / Path(path).with_name(f"test_{Path(path).name}")
    folder = next(folder for folder in mirror.parents if folder.exists())
    files = sorted(folder.glob("test_*.py")) or sorted(folder.rglob("test_*.py"))
    found = {"mirror": [mirror] if mirror.exists() else [], "folder": [file for file in files if file != mirror]}
    given = {
        stage: (*ranks_for(tests), "-x", SHARES[stage], *(str(file.relative_to(copy)) for file in tests))
        for stage, tests in found.items()
        if tests
    }
    if ">>>" in (copy / path).read_text():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        name = module if module.startswith("distconv") else f"distconv.{module}"
        given = {"doctests": ("--ranks", "serial", "-x", SHARES["doctests"], f"{DOCTESTS}[{name}]"), **given}
    return given


def ranks_for(files: list[Path]) -> tuple[str, ...]:
    """Return the rank counts of the short run, or "serial" alone where no test would run under mpiexec.

    The few tests on 6 and 8 ranks would take half of the time of a file.
    """
    return ("--ranks", "serial,2,3,4" if any(selection.for_ranks(file) for file in files) else "serial")


@functools.cache
def passes(copy: Path, arguments: tuple[str, ...], limit_s: float) -> bool:
    """Return True if tests pass without a mutation."""
    return run(copy, arguments, limit_s) is None


def run(copy: Path, arguments: tuple[str, ...], limit_s: float) -> Failure | None:
    """Run tests until the first failure. Return it, or None if all pass."""
    until = time.monotonic() + limit_s
    environment = {"PYTHONPATH": str(copy)}
    with launch.Job(0, copy / "tests" / "run.py", *arguments, env=environment, cwd=copy) as job:
        while (code := job.process.poll()) is None and time.monotonic() < until and not SIGNS.search(job.output()):
            time.sleep(0.2)
        output = job.output()
    sign = SIGNS.search(output)
    if sign is None:
        reason = f"time: no end after {limit_s:g} s" if code is None else f"exit code {code}"
        return None if code in (0, NO_TESTS) else Failure(reason, arguments)
    found = TEST.search(output, sign.start() if sign[0].startswith("FAILED") else 0)
    if found is None:
        return Failure("a job ended", arguments)
    test = "::".join(filter(None, found.groups()))
    hung = "time: " if "still running after" in output else ""
    share = next(argument for argument in arguments if argument in SHARES.values())
    return Failure(f"{hung}{test}", (share, "--ranks", RANKS.findall(output, 0, sign.end())[-1], test))

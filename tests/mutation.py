"""Small breaks, one at a time in a copy of the checkout: which tests notice them, and how soon?

    python tests/mutation.py                        all breaks of tests/breaks/
    python tests/mutation.py --folder layers/nn     those in modules whose path begins so
    python tests/mutation.py --stage 2              by quick tests alone

``tests/breaks/FOLDER.txt`` lists them: a module and a few words, a text that occurs in it exactly once, a new one.

    ### kernels/packing.py: one element is left out
    range(count)
    --->
    range(count - 1)

Each break meets the quick tests of the file that mirrors its module, those of the folder, that file in full, and the
folder in full, until one of them fails. The tests are taken to pass without it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from tests.harness import launch  # noqa: E402

HEAD, ARROW = "### ", "\n--->"
STAGES = ("mirror, quick", "folder, quick", "mirror, full", "folder, full")
LIMIT_S = (300.0, 600.0, 1200.0, 1800.0)
SIGNS = re.compile(r"^FAILED, |behind the test that stopped the job", re.MULTILINE)
"""What tests/run.py prints when a test has failed; what comes behind it need not be waited for."""
TEST = re.compile(r"tests/[\w/]+\.py(?:::\w+)*(?:\[\S*?\])?(?=[:\s])")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "_build")
NO_TESTS = 5


class Break(NamedTuple):
    """One change of one module, which some test should notice."""

    path: str
    words: str
    old: str
    new: str


class Finding(NamedTuple):
    """What came of a break: the stage at which it was noticed (0: at none), by which test, after how long."""

    stage: int
    test: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.test.startswith("stale"):
            return self.test
        return f"{STAGES[self.stage - 1] if self.stage else 'SURVIVES':13} {self.seconds:5.0f} s  {self.test}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="", help="how the paths of the modules begin")
    parser.add_argument(
        "--stage", type=int, default=len(STAGES), choices=range(1, len(STAGES) + 1), help="the last one"
    )
    options = parser.parse_args(arguments)
    lists = sorted((root / "tests" / "breaks").glob("*.txt"))
    breaks = [each for file in lists for each in read(file.read_text()) if each.path.startswith(options.folder)]
    findings: dict[str, list[Finding]] = {}
    with tempfile.TemporaryDirectory(prefix="distconv-mutation-") as place:
        copy = Path(place) / "checkout"
        shutil.copytree(root, copy, symlinks=True, ignore=NOT_COPIED)
        if (root.parent / "shared").exists():
            (copy.parent / "shared").symlink_to(root.parent / "shared")  # sample data, which some tests look for
        for each in breaks:
            findings.setdefault(each.path.split("/")[0], []).append(finding := applied(copy, each, options.stage))
            print(f"{each.path}: {each.words}\n    {finding}", flush=True)
    print(*summary(findings), sep="\n")
    return 0 if all(finding.stage for found in findings.values() for finding in found) else 1


def read(text: str) -> Iterator[Break]:
    """The breaks of one list."""
    for part in re.split(f"^{HEAD}", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        path, _, words = head.partition(": ")
        old, arrow, new = body.partition(ARROW)
        if not arrow:
            raise SystemExit(f"{head}: no line '{ARROW.strip()}' between the old text and the new one")
        yield Break(path, words, old.strip("\n"), new.strip("\n"))


def applied(copy: Path, each: Break, last: int) -> Finding:
    """Break the copy, run its tests, and mend it again."""
    module = copy / each.path
    text = module.read_text() if module.exists() else ""
    count = text.count(each.old)
    if count != 1:
        return Finding(0, f"stale: the old text occurs {count} times")
    started = time.monotonic()
    module.write_text(text.replace(each.old, each.new))
    forget_kernels(copy)
    try:
        for stage, tests in enumerate(stages(copy, each.path)[:last], start=1):
            test = failing(copy, tests, LIMIT_S[stage - 1]) if tests else None
            if test is not None:
                return Finding(stage, test, time.monotonic() - started)
    finally:
        module.write_text(text)
        forget_kernels(copy)
    return Finding(0, "", time.monotonic() - started)


def forget_kernels(copy: Path) -> None:
    """Remove what numba has kept: it asks whether the file of a kernel has changed, not those of kernels called."""
    for kept in (*copy.rglob("*.nbi"), *copy.rglob("*.nbc")):
        kept.unlink()


def stages(copy: Path, path: str) -> list[list[str]]:
    """The arguments of tests/run.py for each stage; none where a module has no test file of its name."""
    mirror = copy / "tests" / Path(path).with_name(f"test_{Path(path).name}")
    folder = mirror.parent
    while not folder.exists():
        folder = folder.parent
    own = [str(mirror.relative_to(copy))] if mirror.exists() else []
    whole = [str(folder.relative_to(copy))]
    return [own and ["--quick", *own], ["--quick", *whole], own, whole]


def failing(copy: Path, tests: list[str], limit_s: float) -> str | None:
    """The first test that fails, None if all pass; what does not end fails, and is called a hang."""
    until = time.monotonic() + limit_s
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with launch.Job(0, copy / "tests" / "run.py", "-x", *tests, env=environment, cwd=copy) as job:
        while (code := job.process.poll()) is None and time.monotonic() < until and not SIGNS.search(job.output()):
            time.sleep(0.2)
        output = job.output()
    if code in (0, NO_TESTS):
        return None
    sign = SIGNS.search(output)
    if sign is None and code is None:
        return f"hang: no end after {limit_s:g} s"
    named = TEST.search(output, sign.start() if sign and sign.group().startswith("FAILED") else 0)
    return ("hang: " if "still running after" in output else "") + (named.group() if named else f"exit code {code}")


def summary(findings: dict[str, list[Finding]]) -> Iterator[str]:
    """A line for each folder."""
    yield f"{'folder':12} {'breaks':>6} {'quick':>6} {'all':>6} {'hangs':>6} {'stale':>6}"
    for folder, found in findings.items():
        fresh = [finding for finding in found if not finding.test.startswith("stale")]
        quick, noticed = sum(0 < each.stage <= 2 for each in fresh), sum(each.stage > 0 for each in fresh)
        hangs = sum(each.test.startswith("hang") for each in fresh)
        yield f"{folder:12} {len(fresh):6} {quick:6} {noticed:6} {hangs:6} {len(found) - len(fresh):6}"


if __name__ == "__main__":
    sys.exit(main())

"""The code blocks of a page: their language, their marker, and how Python among them is run."""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
PAGES += [Path("README.md")]


@dataclass(frozen=True)
class Block:
    """One fenced block, or a comment ``<!-- python ... -->``, which prepares what a reader has already."""

    page: Path
    line: int
    language: str
    marker: str
    """The word behind the language: ``third-party`` needs that extra, ``cluster`` a batch system."""
    text: str

    @property
    def file(self) -> str:
        """The file that the block is, by its first line: ``# train.py``."""
        found = re.match(r"# (\w+\.(?:py|sh|sbatch))\n", self.text)
        return found[1] if found else ""

    def run(self, namespace: dict[str, Any], folder: Path, rank: int) -> None:
        """Run Python in ``namespace``; a file is written to ``folder`` by rank 0, and run as a script of its own."""
        if self.file:
            namespace = {"__name__": "__main__"}
            if rank == 0:
                (folder / self.file).write_text(self.text)
        if self.language == "pycon":
            return self._compare(namespace, rank)
        # Behind so many empty lines that a traceback has those of the page.
        exec(compile("\n" * self.line + self.text, str(ROOT / self.page), "exec"), namespace)

    def _compare(self, namespace: dict[str, Any], rank: int) -> None:
        """As doctests; what is printed is rank 0's."""
        test = doctest.DocTestParser().get_doctest(self.text, namespace, str(self.page), str(self.page), self.line)
        checker = doctest.OutputChecker() if rank == 0 else _AnyOutput()
        told: list[str] = []
        runner = doctest.DocTestRunner(checker, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, out=told.append, clear_globs=False)
        namespace.update(test.globs)
        assert not runner.failures, "".join(told)


class _AnyOutput(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return True


def blocks(page: Path) -> list[Block]:
    """All of ``page``, in order."""
    text = (ROOT / page).read_text()
    pattern = r"^(?:```(\w+)(?: ([\w-]+))?\n(.*?)^```$|<!-- python\n(.*?)^-->$)"
    return [
        Block(page, text[: found.start()].count("\n") + 1, found[1] or "python", found[2] or "", found[3] or found[4])
        for found in re.finditer(pattern, text, re.M | re.S)
    ]


def commands(text: str) -> list[str]:
    """The lines of a shell block, those that go on joined; of a console block those behind ``$``."""
    lines = text.replace("\\\n", " ").splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    return prompted or lines

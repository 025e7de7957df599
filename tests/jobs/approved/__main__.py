"""Write the approved files again, by the tests that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import approved

ROOT = Path(__file__).parents[3]

if __name__ == "__main__":
    approved.update = True
    tests = {str(path): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    users = [path for path, text in tests.items() if "tests.jobs.approved" in text or "option_tests" in text]
    raise SystemExit(pytest.main(["-q", *users]))

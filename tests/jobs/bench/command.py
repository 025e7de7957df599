"""Check of the ratios that benchmarks print."""

from __future__ import annotations

import json


def assert_ratios_are_printed(lines: list[str], names: list[str]) -> None:
    """That medians of ``names``, in JSON in the last line, stand in the tables with their ratios to the first."""
    found = json.loads(lines[-1])["median_s"]
    for medians in [found] if names[0] in found else found.values():
        assert list(medians) == names
        for name, median in medians.items():
            ratio = f"{median / medians[names[0]]:.3f}"
            assert any(line.startswith(f"{name} ") and line.endswith(ratio) for line in lines)

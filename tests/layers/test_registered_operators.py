"""The torch functions that each module registers an operator for, as approved, with the properties of their rules."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from functools import partial

from distconv import dispatch
from tests.jobs.approved import assert_approved

FOLDERS = tuple(f"distconv.layers.{folder}." for folder in ("nn", "math", "tensor", "common"))


def registered() -> str:
    """Return a line for each module and kind of rule, with the functions that it registers."""
    found: dict[str, list[str]] = defaultdict(list)
    for function, rule in dispatch.rules().items():
        operator = rule.operator
        while isinstance(operator, partial):
            operator = operator.func
        module = str(getattr(operator, "__module__", ""))
        if module.startswith(FOLDERS):
            rest = f"{rule.kind.name} {rule.order.name} {rule.tensors!r} {rule.passes}"
            found[f"{module}, {rest}"].append(dispatch.name_of(function))
    return "\n".join(f"{where}: {' '.join(sorted(names))}" for where, names in sorted(found.items()))


def test_registered_operators() -> None:
    # In a process of its own, since other tests register operators and import modules that do.
    script = f"from {__name__} import registered; print(registered())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert_approved("operators", done.stdout)

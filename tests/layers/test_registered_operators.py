"""The torch functions that each module registers an operator for, as approved, with the properties of their rules."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from distconv import dispatch
from tests.jobs.approved import assert_approved

FOLDERS = tuple(f"distconv.layers.{folder}." for folder in ("nn", "math", "tensor", "common"))


def test_registered_operators() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for function, rule in dispatch.rules().items():
        operator = rule.operator
        while isinstance(operator, partial):
            operator = operator.func
        module = str(getattr(operator, "__module__", ""))
        # Not those of rules that other tests have made.
        if not module.startswith(FOLDERS):
            continue
        rest = f"{rule.kind.name} {rule.order.name} {rule.tensors!r} {rule.passes}"
        found[f"{module}, {rest}"].append(dispatch.name_of(function))
    assert_approved(
        "operators", "\n".join(f"{where}: {' '.join(sorted(names))}" for where, names in sorted(found.items()))
    )

"""State of a DistTensor is written by its own module only, and state shared by its views by their module."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.structure.modules import ROOT, SOURCES, parsed

WRITERS = {
    "_local": {"distconv/tensor.py"},
    "_shape": {"distconv/tensor.py"},
    "_strides": {"distconv/tensor.py"},
    "_memory": {"layers/common/inplace_views.py"},
    "_view": {"layers/common/inplace_views.py"},
}


def written(tree: ast.Module) -> Iterator[str]:
    """Attributes of WRITERS that are set on something else than ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in WRITERS:
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            yield from [] if own else [node.attr]


def test_state_of_tensors_is_written_by_one_module() -> None:
    others = [
        f"{path.relative_to(ROOT)} sets {name}"
        for module, path in SOURCES.items()
        for name in written(parsed(module))
        if str(path.relative_to(ROOT)) not in WRITERS[name]
    ]
    assert not others


def test_a_write_from_elsewhere_is_found() -> None:
    source = "x._strides = None\ny.dist, y._shape = z\nself._local = t\nz = x._view\nfor x._memory in y: pass"
    assert set(written(ast.parse(source))) == {"_strides", "_shape", "_memory"}

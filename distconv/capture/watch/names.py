"""Names in code: of global variables, of those of functions around it, of attributes."""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType


@dataclass(frozen=True)
class Names:
    """Names in code, and in that of functions that it makes, by what is done with them.

    A local variable may have the name of a global one, and has nothing to do with it.
    """

    globals: frozenset[str]
    globals_set: frozenset[str]
    cells: frozenset[str]
    cells_set: frozenset[str]
    attributes: frozenset[str]
    attributes_set: frozenset[str]
    texts: frozenset[str]
    """Texts that may be names of attributes, for ``getattr``."""


_KINDS = {"GLOBAL": "globals", "NAME": "globals", "DEREF": "cells", "ATTR": "attributes", "METHOD": "attributes"}


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """Names in ``code``."""
    found: dict[str, set[str]] = {}
    texts: set[str] = set()
    codes = [code]
    while codes:
        each = codes.pop()
        codes += [const for const in each.co_consts if isinstance(const, CodeType)]
        for step in dis.get_instructions(each):
            kind = next((name for part, name in _KINDS.items() if part in step.opname), None)
            if step.opname == "LOAD_CONST" and isinstance(step.argval, str) and step.argval.isidentifier():
                texts.add(step.argval)
            elif kind and isinstance(step.argval, str):
                way = "" if step.opname.startswith("LOAD_") else "_set"
                found.setdefault(kind + way, set()).add(step.argval)
    sets = {name: frozenset(found.get(name, ())) for name in Names.__annotations__ if name != "texts"}
    return Names(**sets, texts=frozenset(texts))

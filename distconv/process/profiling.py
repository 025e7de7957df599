"""Named ranges in the traces of ``torch.profiler``: ``distconv::conv2d``, ``distconv::wait``, ..."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Returns True if a profiler records this thread."""

_NOTHING = nullcontext()


def section(name: str) -> AbstractContextManager[object]:
    """Return a context manager that names a range ``distconv::name`` in the trace of an active profiler.

    torch's own ``record_function`` takes microseconds even without a profiler.
    """
    return record_function(f"distconv::{name}") if enabled() else _NOTHING

"""Named ranges in the traces of ``torch.profiler``: ``distconv::conv2d``, ``distconv::wait``, ..."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler records this thread."""

_NOTHING = nullcontext()


def section(name: str) -> AbstractContextManager[object]:
    """The range ``distconv::name`` in the trace of the profiler that records this thread, if one does.

    torch's own ``record_function`` takes microseconds without a profiler, too.
    """
    return record_function(f"distconv::{name}") if enabled() else _NOTHING

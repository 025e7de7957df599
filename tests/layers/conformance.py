"""torch's own samples of the operators of a folder of layers, and the conformance table, on two or more ranks.

The tests of each folder run the samples of its operators, so that a mistake in a module fails a test of its own folder.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from mpi4py import MPI

from distconv.dispatch import rule_of
from distconv.grid import ProcessGrid
from distconv.jobs.verification.conformance import samples
from distconv.jobs.verification.conformance.families import TABLE
from distconv.jobs.verification.engine.backends import DistributedBackend, ReferenceBackend
from distconv.jobs.verification.engine.layouts import CaseLayout
from distconv.jobs.verification.engine.runner import Case, CaseRun
from distconv.jobs.verification.engine.verdicts import BAD
from distconv.tensor import DistTensor

OTHER_STRIDES = frozenset({"cross", "linalg.cross"})
"""Operators with results whose strides are neither those of one process nor of contiguous memory."""


class _Reference(ReferenceBackend):
    """Also records the inputs after the call, and keeps the strides of the results."""

    strides: tuple[tuple[int, ...], ...] = ()

    def differentiate(self, outputs: Any, leaves: Mapping[str, torch.Tensor | None], module: Any = None) -> None:
        """Differentiate the outputs."""
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        self.strides = tuple(y.stride() if y.layout is torch.strided else () for y in outputs)
        super().differentiate(outputs, leaves, module)
        for name, leaf in leaves.items():
            self.record(f"{name} after the call", leaf)


class _Checked(_Reference, DistributedBackend):
    """Checks the strides of the results, and the distributions of the gradients of the inputs."""

    expected: tuple[tuple[int, ...], ...] | None = None
    """Strides of the results in one process. None: any strides."""

    def differentiate(self, outputs: Any, leaves: Mapping[str, torch.Tensor | None], module: Any = None) -> None:
        """Differentiate the outputs. The strides must be those of one process, or of contiguous memory."""
        super().differentiate(outputs, leaves, module)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        for y, found, expected in zip(outputs, self.strides, self.expected or self.strides, strict=True):
            contiguous = torch.empty(y.shape, device="meta").stride()
            assert not y.numel() or found in (expected, contiguous), f"strides {found} instead of {expected}"
        for name, leaf in leaves.items():
            if isinstance(leaf, DistTensor) and leaf.grad is not None:
                assert isinstance(leaf.grad, DistTensor) and leaf.grad.dist == leaf.dist, f"dL/d{name} is {leaf.grad}"


class FewLayouts(CaseRun):
    """Computes each case in ``most`` of its layouts, selected by a hash of its name, and checks more of the results."""

    def __init__(self, comm: MPI.Intracomm, most: int) -> None:
        super().__init__(comm)
        self.most = most
        # By the sizes and the memory format of a layout.
        self._strides: dict[Any, tuple[tuple[int, ...], ...]] = {}

    def layouts(self, case: Case) -> Sequence[CaseLayout]:
        """Return ``most`` of the layouts of a case, evenly spaced."""
        found = super().layouts(case)
        first = zlib.crc32(f"{case.operator} {case.option}".encode())
        step = max(1, len(found) // self.most)
        return [found[(first + step * k) % len(found)] for k in range(min(self.most, len(found)))]

    def backend(self, case: Case, layout: CaseLayout, grid: ProcessGrid) -> ReferenceBackend:
        """Return the backend of the ranks, which knows the strides of the reference."""
        backend = _Checked(grid, layout, self.fails)
        backend.expected = None if case.operator in OTHER_STRIDES else self._strides[layout.sizes, layout.channels_last]
        return backend

    def _attempt(self, case: Case, backend: ReferenceBackend) -> Any:
        if type(backend) is not ReferenceBackend:
            return super()._attempt(case, backend)
        reference = _Reference(backend.layout)
        part = super()._attempt(case, reference)
        self._strides[backend.layout.sizes, backend.layout.channels_last] = reference.strides
        return part


def folder_of(function: object) -> str | None:
    """Return the folder of ``layers`` whose module registers an operator for a torch function."""
    rule = rule_of(function) if function is not None else None
    if rule is None:
        return None
    operator = rule.operator
    while isinstance(operator, partial):
        operator = operator.func
    parts = str(getattr(operator, "__module__", "")).split(".")
    return parts[2] if parts[:2] == ["distconv", "layers"] and len(parts) > 3 else None


@cache
def sampled_operators(folder: str) -> tuple[str, ...]:
    """Return the names of torch's samples whose operators are in a folder."""
    found = []
    for name, infos in samples._sample_databases().items():
        info = infos[0]
        functions = [getattr(info, way, None) for way in ("op", "method_variant", "inplace_variant")]
        folders = {folder_of(function) for function in functions} | ({"nn"} if name.startswith("nn.") else set())
        if folder in folders:
            found.append(name)
    return tuple(found)


def sampled_cases(folder: str) -> Iterator[Case]:
    """Yield two of the largest samples of each operator of a folder: one as it is, one in place if it can be."""
    for name in sampled_operators(folder):
        yield from itertools.islice(samples.largest(name), 2)


PARTS = 4
"""Parts of the operators of a folder in :func:`further_sampled_cases`. The short run takes four cases of a test."""


def further_sampled_cases(folder: str, part: int) -> Iterator[Case]:
    """Yield up to ten other samples of each operator in one of ``PARTS``, evenly spaced: other options and shapes."""
    for name in sampled_operators(folder)[part::PARTS]:
        found = list(samples.samples(name, 200))
        yield from found[:: max(1, -(-len(found) // 10))]


def table_cases(*families: str) -> Iterator[Case]:
    """Yield the cases of some families of the conformance table."""
    for family in families:
        yield from TABLE[family]


def wrong_lines(comm: MPI.Intracomm, cases: Iterable[Case], most: int = 1) -> list[str]:
    """Return a line for each case and layout whose values, gradients or errors are not torch's. Collective."""
    run = FewLayouts(comm, most)
    return [
        f"{line.operator} {line.option}, {line.layout}: {line.verdict.value} {line.text}"
        for case in cases
        for line in run.lines("", case)
        if line.verdict in BAD
    ]

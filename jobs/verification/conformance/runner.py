"""Runs cases in one process and over the ranks of a job, and says what came of each."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from mpi4py import MPI

from distconv.communication.transport import Traffic, counted
from distconv.errors import ReplicationWarning
from distconv.grid import ProcessGrid
from distconv.jobs.verification.conformance.case import VALUES, Case, Input, Sizes
from distconv.jobs.verification.conformance.layouts import Layout, layouts
from distconv.jobs.verification.differential import verdicts
from distconv.jobs.verification.differential.verdicts import NOT_FINITE, Outcome, Refusal, difference, judge, refusal
from distconv.jobs.verification.differential.watch import Watch
from distconv.layers.plumbing import call_site
from distconv.parallel import parallelize
from distconv.placement import scatter
from distconv.tensor import DistTensor

TIME_LIMIT_S = 30.0
_SEED = 5

_WAY_OUT = re.compile(
    r"[;:(,] ?(?:first )?(?:or )?(add|apply|assign|call|choose|compute|convert|gather|give|index|load|make|move|pass"
    r"|permute|put|redistribute|replicate|reshape|run|save|say|scatter|set|split|start|take|use|write)\b"
)
"""A clause that begins with what to do."""


class Verdict(Enum):
    """The ends of a case. WRONG comprises all that must never happen, an exception without a way out included.

    INFINITE: an input has infinities, and NaN stands in other places than torch's: a block is padded with zeros where
    torch has neighbours, and zero times infinity is NaN. Such numbers mean that a training has diverged before.
    """

    EXACT = "exact"
    REDISTRIBUTES = "redistributes"
    REPLICATES = "replicates"
    RAISES = "raises"
    REFUSED = "refused as torch does"
    INFINITE = "differs at infinities"
    WRONG = "WRONG"
    UNCLEAR = "UNCLEAR"
    HANGS = "HANGS"


EXACT = frozenset({Verdict.EXACT, Verdict.REDISTRIBUTES, Verdict.REPLICATES})
"""Those that agree with torch."""

BAD = frozenset({Verdict.WRONG, Verdict.UNCLEAR, Verdict.HANGS})
"""For which a run fails."""


@dataclass(frozen=True)
class Line:
    """What came of one case on one layout. Bytes are of all ranks together, forward and backward."""

    family: str
    operator: str
    option: str
    layout: str
    grid: str
    ranks: int
    verdict: Verdict
    text: str = ""
    """The message of an exception, or what is wrong."""
    moved_bytes: int = 0
    """Messages that change a distribution: redistributions and their adjoints."""
    halo_bytes: int = 0
    """All other messages: halo exchanges, assembled boxes, shares of sums, and their adjoints."""
    reduced_bytes: int = 0
    """Buffers handed to allreduces."""


@dataclass(frozen=True)
class _Part:
    """One rank's share of a line."""

    outcome: Outcome
    sent: Counter[str] = field(default_factory=Counter)
    reduced: int = 0
    replicates: bool = False


class OthersRaise(Exception):
    """Forward raised, but not on this rank."""


class _Place:
    """One process: plain tensors, and the module as it is."""

    def put(self, given: Input, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    def prepare(self, case: Case, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def together(self, forward: Callable[[], _Forward]) -> _Forward:
        return forward()


class _Ranks(_Place):
    """The ranks of ``grid``, inputs split as ``layout`` says."""

    def __init__(self, grid: ProcessGrid, layout: Layout) -> None:
        self._grid, self._layout = grid, layout

    def put(self, given: Input, value: torch.Tensor) -> torch.Tensor:
        if given.layout == "plain":
            return value.clone()
        x = scatter(value, self._layout.distribution(self._grid, given))
        return DistTensor(x.local.detach(), x.dist, x.shape)

    def prepare(self, case: Case, module: torch.nn.Module) -> torch.nn.Module:
        return parallelize(module, self._grid) if case.parallel else module

    def together(self, forward: Callable[[], _Forward]) -> _Forward:
        """``forward()``, or an error if only other ranks have one: then backward would wait for them for ever."""
        failed = True
        try:
            result = forward()
            failed = False
        finally:
            anywhere = self._grid.world.allreduce(failed, MPI.LOR)
        if anywhere:
            raise OthersRaise("not on this rank")
        return result


def _values(case: Case, given: Input, sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    made = VALUES[given.values](given.shape(sizes), sizes, generator)
    return made.to(given.dtype or case.dtype) if made.is_floating_point() else made


@dataclass(frozen=True)
class _Forward:
    """What a case has computed, and went in."""

    inputs: list[torch.Tensor]
    module: torch.nn.Module | None
    outputs: list[torch.Tensor]

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Results, gradients and buffers."""
        yield from ((f"y{number}", y) for number, y in enumerate(self.outputs))
        yield from ((f"dL/dx{number}", x.grad) for number, x in enumerate(self.inputs) if x.grad is not None)
        if self.module is not None:
            yield from ((f"dL/d{name}", p.grad) for name, p in self.module.named_parameters() if p.grad is not None)
            yield from self.module.named_buffers()


def _forward(case: Case, sizes: Sizes, place: _Place) -> _Forward:
    torch.default_generator.manual_seed(_SEED)
    module = None if case.module is None else case.module(sizes).to(case.dtype)
    generator = torch.Generator().manual_seed(_SEED)
    inputs = [place.put(given, _values(case, given, sizes, generator)) for given in case.inputs]
    for given, leaf in zip(case.inputs, inputs, strict=True):
        leaf.requires_grad_(given.grad and leaf.is_floating_point())
    if module is not None:
        module = place.prepare(case, module)
    torch.default_generator.manual_seed(_SEED)  # what draws numbers draws the same ones in both worlds
    result = case.function(*inputs) if module is None else case.function(module, *inputs)
    return _Forward(inputs, module, [result] if isinstance(result, torch.Tensor) else list(result))


def _backward(outputs: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(_SEED + 1)
    differentiable = [y for y in outputs if y.requires_grad]
    for y in differentiable:
        gradient = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        y.backward(gradient, retain_graph=y is not differentiable[-1])


class Run:
    """A conformance run on the ranks of ``comm``."""

    def __init__(self, comm: MPI.Intracomm, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.comm = comm
        self._private = comm.Dup()
        self._grids: dict[tuple[tuple[str, int], ...], ProcessGrid] = {}
        self._watch = Watch(comm, time_limit_s)

    def lines(self, family: str, case: Case) -> Iterator[Line]:
        """Run ``case`` on all its layouts, in order. Collective."""
        known: dict[tuple[tuple[str, int], ...], tuple[Refusal | None, dict[str, torch.Tensor]]] = {}
        with self._watch.running():
            for layout in layouts(case, self.comm.size):
                if layout.sizes not in known:
                    with warnings.catch_warnings():
                        known[layout.sizes] = self._attempt(case, layout, _Place())[:2]
                yield self._line(family, case, layout, *known[layout.sizes])

    def _line(
        self, family: str, case: Case, layout: Layout, reference: Refusal | None, expected: dict[str, torch.Tensor]
    ) -> Line:
        grid = self._grid(layout.extents)
        self._watch.begin(f"{case.operator} {case.option}, {layout.kind} ({grid.describe()})")
        call_site.forget()
        with warnings.catch_warnings(record=True) as told:
            refused, found, traffic = self._attempt(case, layout, _Ranks(grid, layout))
        compared = "" if refused or reference else difference(expected, found, case.condition)
        replicates = any(issubclass(warning.category, ReplicationWarning) for warning in told)
        part = _Part(Outcome(refused, compared), traffic.sent, sum(traffic.reduced.values()), replicates)
        parts = self._private.allgather(part)
        verdict, text = _judged(case, reference, parts)
        moved, halo = _bytes(parts)
        if verdict is Verdict.EXACT and replicates:
            verdict = Verdict.REPLICATES
        elif verdict is Verdict.EXACT and moved:
            verdict = Verdict.REDISTRIBUTES
        reduced = sum(part.reduced for part in parts)
        numbers = (moved, halo, reduced) if verdict in EXACT else (0, 0, 0)
        place = (family, case.operator, case.option, layout.kind, grid.describe(), self.comm.size)
        return Line(*place, verdict, text, *numbers)

    def _attempt(
        self, case: Case, layout: Layout, place: _Place
    ) -> tuple[Refusal | None, dict[str, torch.Tensor], Traffic]:
        refused, found, traffic = None, dict[str, torch.Tensor](), Traffic()
        try:
            with counted() as traffic:
                warnings.simplefilter("always")
                forward = place.together(lambda: _forward(case, dict(layout.sizes), place))
                _backward(forward.outputs)
                found = dict(forward.named())
        except Exception as error:
            self._watch.case += f" [{type(error).__name__}: {error}]"
            refused = refusal(error)
        return refused, found, traffic

    def _grid(self, extents: tuple[tuple[str, int], ...]) -> ProcessGrid:
        if extents not in self._grids:
            self._grids[extents] = ProcessGrid(self.comm, **dict(extents))
        return self._grids[extents]


def _judged(case: Case, reference: Refusal | None, parts: list[_Part]) -> tuple[Verdict, str]:
    verdict, text = judge(reference, [part.outcome for part in parts])
    if verdict is verdicts.Verdict.WRONG and NOT_FINITE in text and case.infinite:
        return Verdict.INFINITE, text
    if verdict is verdicts.Verdict.EXACT:
        return Verdict.EXACT, ""
    if verdict in (verdicts.Verdict.REFUSED, verdicts.Verdict.OTHER_WORDS):
        return Verdict.REFUSED, text
    if verdict is verdicts.Verdict.WRONG:
        return Verdict.WRONG, text
    if not names_a_way_out(text):
        return Verdict.WRONG, f"names no way out: {text}"
    return Verdict.RAISES, text


def names_a_way_out(text: str) -> bool:
    """Whether a message says what to do instead: one of its clauses, behind the first, is an imperative.

    >>> names_a_way_out("it has no rule; gather it first"), names_a_way_out("channels must not be split")
    (True, False)
    """
    return _WAY_OUT.search(text) is not None


def _bytes(parts: list[_Part]) -> tuple[int, int]:
    """Bytes that redistributions moved, and those of all other messages."""
    sent: Counter[str] = sum((part.sent for part in parts), Counter())
    moved = sum(count for what, count in sent.items() if what.startswith("redistribution"))
    return moved, sent.total() - moved

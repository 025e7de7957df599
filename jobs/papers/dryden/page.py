"""The pages of :mod:`distconv.jobs.papers.dryden.predictions` in Markdown: constants, single layers, tables, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

from distconv.jobs.papers.dryden.calibration import LASSEN, FittedConstant, constants_of, with_constants, with_roofline
from distconv.jobs.papers.dryden.layers import SINGLE, SQUARES, speedups
from distconv.jobs.papers.dryden.layers import section as layer_section
from distconv.jobs.papers.dryden.predictions import (
    CELLS,
    GRIDS,
    SETTINGS,
    Grids,
    PredictedTimes,
    Predictions,
    amdahl_error,
    calibrated,
    graph_of,
    held_out,
    mean_error,
    seconds,
)
from distconv.jobs.papers.dryden.published import TABLE_II, TABLES, PublishedTime, Table, calibrates
from distconv.perfmodel.cost.evaluation import evaluate
from distconv.perfmodel.machine.machine import Machine
from distconv.plan import format_parts

OFF = 0.1
"""Held-out cells with a larger error than this are listed with a reason."""

# Two other families of grids, for the section on other choices.
NEAR_SQUARE: Grids = {**GRIDS, 16: {"h": 4, "w": 4}}
SLABS: Grids = {group: {"h": group} if group > 1 else {} for group in GRIDS}

GENERATED = "<!-- Generated; do not edit. Command: distconv reproduce dryden --out docs/evidence/paper-tables.md -->"

INTRODUCTION = """\
`distconv.perfmodel` predicts Tables I, II and III ([all cells](paper-tables-cells.md),
[errors](paper-tables-errors.md)) and the [single layers](paper-tables-layers.md) of section VI-A for the machine
`lassen`. *Uncalibrated* predictions use data sheets alone. *Calibrated* ones have five constants fitted to the times
and speed-ups of Table I's rows N=4 and N=128, marked `*`; every other cell is held out. Speed-ups are ratios of the
published times, and an error is (predicted - published) / published.

The predictions use {batch_norm} batch norm, as LBANN does, and float32. Halo exchanges and all-reduces overlap with
computation as far as possible. The paper states neither the grids of a sample's GPUs nor the widths of the mesh
networks (`layers/models/mesh.py`). The grids used here are {grids}: a square on each node, and nodes along h. Table I
hardly depends on this choice (last section)."""

CAVEATS = """\
Choices made with knowledge of the published results:

- The widths of the mesh networks are ours. **The width of mesh2k, 128, was chosen by Table II**, which is held out from
  the fit of constants only. The last section has the results of other widths.
- The form of the model was chosen with knowledge of all published results, including the three ratios of VI-A. Nothing
  is fitted to these ratios. The last section has the results of other forms.
- Fitted constants at their bounds: {}. The last section has the results of wider bounds.
- VI-A does not print the full shape of any layer, nor grids. conv1 is the first layer of ResNet-50, which is known.
- Speed-ups are compared. **Predicted times of ResNet-50's steps are up to two thirds longer than published** on one GPU
  (Table III), because the cost of kernels that do not fill the device is fitted to Table I."""

EXPONENTS = """\
The speed of a kernel that does not fill the device is proportional to a power of the fraction that it fills. The
constants are fitted again with each power (nearly square grids; conv1 on 8 GPUs, conv1_1 with K=5 and conv6_1 with
C=384 on 16):
"""

POWERS = {"1/2: tiles shrink freely": 1 / 2, "2/3": 2 / 3, "**3/4**": 3 / 4, "1: tiles never shrink": 1.0}

WIDTHS = "The width of mesh2k, with the calibrated constants:"

WHY = """\
- **Allreduces.** Predicted allreduces take longer than the backward pass, and speed-ups of Table III fall to 1;
  published ones fall from 1.8 to 1.4. Each step of an allreduce takes one latency, fitted to Table I (the table below
  has smaller ones). In Table I, at 8 and 16 GPUs per sample, halos cross nodes while allreduces run; the model has no
  contention between them. ResNet-50 with up to 4 GPUs per group has no halo between nodes, but three times as many
  allreduces. The model runs one allreduce at a time, as the paper's does (V-B).
- **Baseline.** From 2 to 4 GPUs per sample Table II's step is 2.0-2.1 times as fast. Dividing the work cannot give more
  than 2. The paper says that cuDNN chooses slower algorithms if little memory is left for its workspace (VI-B1), as
  with 2 GPUs here. A roofline does not depend on the workspace, and halos and fixed costs keep the prediction below 2.
  All speed-ups of Table II are relative to that column. Those of Table I at 2 GPUs are predicted low for the same
  reason.
- **Small domains.** The paper finds that convolutions do not get faster in proportion where domains are small (VI-B1,
  VI-B2). In the model, one number of elements fills a GPU for all kernels, fitted to a network of 304 channels.
  For narrower layers (16 GPUs per sample in Table II) the predicted gain is too large.

Predicted mini-batch times of Tables II and III are longer than published: the speed of kernels is fitted to Table I's
network, which has 304 channels in all layers, and the widths of both mesh networks are ours.
"""

FORMS = """\
The held-out cells were known when the form of the cost model and the bounds of the constants were chosen. Each choice
has a physical reason, but the cells are held out from the fit only. Other choices, with the present form:
"""


def pages(results: PredictedTimes, name: str) -> dict[str, str]:
    """Return the texts of all pages by their file names.

    Parameters
    ----------
    results : PredictedTimes
        Predictions.
    name : str
        File name of the first page without its extension. Those of the others begin with it.

    Returns
    -------
    dict of str to str
    """
    parts = {
        "": ("The tables of Dryden et al. 2019, predicted", [_preface(results), _mean_error_table(results)]),
        "-layers": ("Single layers of Dryden et al. 2019, predicted", [layer_section(results.fitted.machine)]),
        "-cells": ("Tables I to III of Dryden et al. 2019, all cells", [tables(results)]),
        "-errors": ("Errors of the predicted tables of Dryden et al. 2019", [_listed_errors(results)]),
    }
    parts[""][1].append(_other_choices(results))
    return {
        f"{name}{part}.md": "\n".join((f"# {title}", "", GENERATED, "", *chain.from_iterable(sections))).rstrip() + "\n"
        for part, (title, sections) in parts.items()
    }


def _row(*entries: object) -> str:
    return f"| {' | '.join(map(str, entries))} |"


def _table_head(*head: str) -> list[str]:
    return [_row(*head), "|" + "---|" * len(head)]


def _preface(results: PredictedTimes) -> Iterator[str]:
    grids = "; ".join(f"{group}: {format_parts(dict(grid))}" for group, grid in GRIDS.items() if grid)
    yield from (
        *INTRODUCTION.format(batch_norm=SETTINGS.batch_norm, grids=grids).splitlines(),
        "",
        *_caveats(results),
        "",
        "## Constants",
        "",
        *_table_head("constant", "data sheet", "source", "bounds of the fit", "calibrated"),
    )
    fitted = constants_of(results.fitted.machine)
    for constant in LASSEN:
        yield _row(
            constant.name,
            _quantity(constant.sheet, constant.unit),
            constant.source,
            f"{_quantity(constant.low, constant.unit)} - {_quantity(constant.high, constant.unit)}: {constant.bounds}",
            _quantity(fitted[constant.name], constant.unit) + _at_bound(constant, fitted[constant.name]),
        )
    machine = results.fitted.machine
    for name, value, source in (
        ("network latency", _quantity(machine.network.latency_s, "s"), "assumed; of a message, as halos are sent"),
        ("node latency", _quantity(machine.node.latency_s, "s"), "assumed"),
        ("node bandwidth", _quantity(machine.node.bandwidth_bytes_per_s, "B/s"), "IBM AC922, three NVLink 2.0 bricks"),
        (
            "network bandwidth",
            _quantity(machine.network.bandwidth_bytes_per_s, "B/s"),
            "a GPU's share of two EDR ports",
        ),
        ("GPUs per node", machine.ranks_per_node, "the paper, VI"),
    ):
        yield _row(name, value, source, "not fitted", "")
    yield ""


def _caveats(results: PredictedTimes) -> list[str]:
    """Return the caveats of the results, as lines."""
    fitted = constants_of(results.fitted.machine)
    bound = [constant.name for constant in LASSEN if _at_bound(constant, fitted[constant.name])]
    return CAVEATS.format(", ".join(bound) or "none").splitlines()


def _at_bound(constant: FittedConstant, value: float) -> str:
    # Within 1 %, because the solver keeps its points strictly inside the bounds.
    ends = (end for end in (constant.low, constant.high) if abs(value / end - 1) < 0.01)
    return " (at its bound)" if any(ends) else ""


def _quantity(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G")):
        if unit in ("FLOP/s", "B/s") and value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value * 1e6:.3g} us" if unit == "s" else f"{value:,.0f} {unit}"


# -- tables -----------------------------------------------------------------------------------------------------------


def tables(results: PredictedTimes, chosen: Sequence[Table] = TABLES) -> Iterator[str]:
    """Yield the lines of the chosen tables.

    Parameters
    ----------
    results : PredictedTimes
        Predictions.
    chosen : sequence of Table
        Tables.

    Yields
    ------
    str
    """
    for table in chosen:
        yield f"## Table {table.name}: {table.caption}"
        yield from ("", "Speed-up: published / uncalibrated / calibrated (error of the last).", "")
        yield from _cells(table, [group for group in table.groups[1:]], lambda cell: _speedup(results, cell))
        yield from ("", "Mini-batch time in ms: published / uncalibrated / calibrated.", "")
        yield from _cells(table, list(table.groups), lambda cell: _time(results, cell))
        yield ""


def _cells(table: Table, groups: Sequence[int], text: Callable[[PublishedTime], str]) -> Iterator[str]:
    yield from _table_head("N", *(f"{group} GPU{'s' if group > 1 else ''}" for group in groups))
    by_size = {(cell.samples, cell.group): cell for cell in table.cells}
    for samples in table.times_s:
        row = (by_size.get((samples, group)) for group in groups)
        yield _row(samples, *(text(cell) if cell else "n/a" for cell in row))


def _speedup(results: PredictedTimes, cell: PublishedTime) -> str:
    sheets, fitted = results.sheets.speedup(cell), results.fitted.speedup(cell)
    mark = "*" if calibrates(cell) else ""
    return f"{cell.speedup:.2f} / {sheets:.2f} / {fitted:.2f} ({results.fitted.error(cell):+.0%}){mark}"


def _time(results: PredictedTimes, cell: PublishedTime) -> str:
    return " / ".join(f"{t * 1e3:.3g}" for t in (cell.time_s, results.sheets.times[cell], results.fitted.times[cell]))


# -- errors -----------------------------------------------------------------------------------------------------------


def _mean_error_table(results: PredictedTimes) -> Iterator[str]:
    yield from ("## Mean absolute error of held-out speed-ups", "")
    cells = [f"{t.name} ({len(held_out(t.name))} cells)" for t in TABLES]
    yield from _table_head("prediction", *cells, f"all ({len(held_out())})")
    serial, best = results.amdahl_serial, results.amdahl_serial_best
    for name, error in (
        ("data sheets", results.sheets.error),
        ("**calibrated**", results.fitted.error),
        (f"Amdahl's law, serial share {serial:.3f} fitted to the same cells", amdahl_error(serial)),
        (f"Amdahl's law, serial share {best:.3f} fitted to the held-out cells", amdahl_error(best)),
    ):
        yield error_row(name, error)
    ours = mean_error(results.fitted.error, held_out())
    ratios = (ours / mean_error(amdahl_error(share), held_out()) for share in (serial, best))
    yield from ("", "Calibrated over Amdahl: {:.2f} of the first, {:.2f} of the second.".format(*ratios), "")


def error_row(name: str, error: Callable[[PublishedTime], float]) -> str:
    """Return a row with the mean absolute errors of held-out cells, by table and over all.

    Parameters
    ----------
    name : str
        Name of the row.
    error : callable
        Relative error of a cell.

    Returns
    -------
    str
    """
    return _row(name, *_mean_errors(error))


def _mean_errors(error: Callable[[PublishedTime], float]) -> list[str]:
    return [f"{mean_error(error, held_out(name)):.1%}" for name in (*(t.name for t in TABLES), None)]


def _listed_errors(results: PredictedTimes) -> Iterator[str]:
    error = results.fitted.error
    yield from ("## Largest errors and their causes", "", f"All held-out cells with an error above {OFF:.0%}:", "")
    yield from _table_head("table", "N", "GPUs per group", "published", "calibrated", "error", "because of")
    for cell in sorted(held_out(), key=lambda cell: -abs(error(cell))):
        if abs(error(cell)) > OFF:
            figures = f"{cell.speedup:.2f}", f"{results.fitted.speedup(cell):.2f}", f"{error(cell):+.0%}"
            yield _row(cell.table, cell.samples, cell.group, *figures, _reason(cell, error(cell)))
    yield from ("", WHY)
    yield from _latencies(results.fitted.machine)
    yield from ("", "Parts of the predicted time in ms; halos and allreduces before overlap:", "")
    yield from _table_head(
        *"table, N, GPUs per group, computation, halos, allreduces, hidden, step, published".split(", ")
    )
    for table in TABLES:
        for samples in (min(table.times_s), max(n for n, t in table.times_s.items() if len(t) == len(table.groups))):
            for cell in (c for c in table.cells if c.samples == samples):
                yield _row(table.name, samples, cell.group, *_spent(results.fitted.machine, cell))
    yield ""


def _reason(cell: PublishedTime, error: float) -> str:
    # The paragraphs of WHY, by their headings.
    if error > 0:
        return "small domains"
    return "allreduces" if cell.table == "III" or cell.group == 16 else "baseline"


def _latencies(fitted: Machine) -> Iterator[str]:
    yield from ("Mean absolute error of held-out cells with the calibrated constants, except one:", "")
    yield from _table_head("collective step", *(table.name for table in TABLES), "all")
    for part in (1.0, 0.5, 0.25, 0.125):
        step_s = part * constants_of(fitted)["collective step"]
        other = with_constants(fitted, {"collective step": step_s})
        yield error_row(_quantity(step_s, "s"), Predictions.on(other).error)


def _spent(machine: Machine, cell: PublishedTime) -> list[str]:
    plan = {"*": {"n": cell.samples // cell.samples_per_group, **GRIDS[cell.group]}}
    prediction = evaluate(graph_of(cell.model, cell.samples), plan, machine, cell.ranks, batch_norm=SETTINGS.batch_norm)
    layers = prediction.layers.values()
    computed = sum(layer.fp + layer.bpx + layer.bpw + layer.update for layer in layers)
    halos, reduced = sum(layer.halo for layer in layers), sum(layer.bpa for layer in layers)
    return [f"{t * 1e3:.1f}" for t in (computed, halos, reduced, prediction.hidden, prediction.time, cell.time_s)]


# -- other forms ------------------------------------------------------------------------------------------------------


def _other_choices(results: PredictedTimes) -> Iterator[str]:
    yield from ("## Other choices", "", FORMS)
    yield from _table_head("choice", "calibration cells", *(table.name for table in TABLES), "all held out")
    sheets = results.sheets.machine
    yield _choice_row("as above", results.fitted)
    for left_out in ("kernel", "bandwidth", "small"):
        some = [constant for constant in LASSEN if constant.name != left_out]
        yield _choice_row(f"{left_out} as in the data sheet", Predictions.on(calibrated(sheets, some)))
    wide = [replace(constant, low=constant.sheet / 20, high=constant.sheet * 20) for constant in LASSEN]
    widely = Predictions.on(calibrated(sheets, wide))
    yield _choice_row("each constant within a factor of 20", widely)
    for name, grids in (("16 GPUs as 4x4", NEAR_SQUARE), ("all GPUs of a sample along h", SLABS)):
        yield _choice_row(name, Predictions.on(calibrated(sheets, grids=grids), grids))
    values = constants_of(widely.machine)
    constants = ", ".join(f"{constant.name} {_quantity(values[constant.name], constant.unit)}" for constant in wide)
    yield from ("", f"Within a factor of 20 of the data sheet the constants become: {constants}.", "")
    yield from _exponents(results)
    yield from _widths(results.fitted.machine)
    yield from ("", "Predicted step at N=4 of Table I with the calibrated constants, by grid:", "")
    yield from _table_head("GPUs per sample", "grid", "ms")
    for cell in (c for c in CELLS if (c.table, c.samples) == ("I", 4) and c.group > 2):
        for grid in _alternatives(cell.group):
            time = seconds(results.fitted.machine, cell, {cell.group: grid})
            yield _row(cell.group, format_parts(grid), f"{time * 1e3:.1f}")


def _choice_row(name: str, predictions: Predictions, *more: str) -> str:
    fitted_to = [cell for cell in CELLS if calibrates(cell) and not cell.is_base]
    return _row(name, f"{mean_error(predictions.error, fitted_to):.1%}", *_mean_errors(predictions.error), *more)


def _exponents(results: PredictedTimes) -> Iterator[str]:
    """Yield errors by the exponent with which an unfilled device slows down, and with more expensive messages."""
    printed = [f"{row.name} ({row.ratio.ratio:g})" for row, _ in SINGLE if row.ratio is not None]
    yield from EXPONENTS.splitlines()
    yield from ("", *_table_head("exponent", "calibration cells", *(table.name for table in TABLES), "all", *printed))
    for name, power in POWERS.items():
        row = calibrated(with_roofline(results.sheets.machine, unfilled=power))
        yield _choice_row(name, Predictions.on(row), *_single_speedups(row))
    fitted = results.fitted.machine
    network = replace(fitted.network, latency_s=constants_of(fitted)["collective step"])
    expensive = replace(fitted, network=network)
    yield _choice_row(
        "**3/4**, messages as expensive as steps (not fitted again)",
        Predictions.on(expensive),
        *_single_speedups(expensive),
    )


def _single_speedups(machine: Machine) -> list[str]:
    return [f"{speedups(machine, row.layer, SQUARES[gpus])[2]:.2f}" for row, gpus in SINGLE]


def _widths(machine: Machine) -> Iterator[str]:
    """Yield Table II by the width of the 2K mesh network, which the paper does not state."""
    yield from ("", WIDTHS, "")
    yield from _table_head(
        "width of mesh2k", "mean error of Table II's speed-ups", "of its times", "predicted / published"
    )
    cells = TABLE_II.cells
    for width in (96, 128, 160):
        times = {cell: seconds(machine, cell, width=width) for cell in cells}
        base = {cell.samples: times[cell] for cell in cells if cell.is_base}
        speedup_errors = [abs(base[c.samples] / times[c] / c.speedup - 1) for c in cells if not c.is_base]
        ratios = [times[c] / c.time_s for c in cells]
        errors = [abs(ratio - 1) for ratio in ratios]
        yield _row(
            width, *(f"{fmean(values_of):.1%}" for values_of in (speedup_errors, errors)), f"{fmean(ratios):.2f}"
        )


def _alternatives(group: int) -> list[dict[str, int]]:
    return [{"h": h, "w": group // h} for h in (group, group // 2, group // 4) if h]

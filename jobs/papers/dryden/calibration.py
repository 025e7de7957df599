"""Constants of a machine, fitted to measured step times; and Amdahl's law, fitted to the same times for comparison.

Some constants cannot be taken from data sheets: programs do not reach peak rates, and data sheets do not state the
latencies of messages between GPUs. The fit starts from the data sheets, stays within physical bounds, and minimizes the
differences between predicted and measured step times and speed-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, minimize_scalar

from distconv.jobs.papers.dryden.published import PublishedTime
from distconv.perfmodel.machine.machine import Machine

Array = npt.NDArray[np.float64]

Predict = Callable[[Machine, PublishedTime], float]
"""Returns the seconds of the training step of a published cell on a machine."""


@dataclass(frozen=True)
class FittedConstant:
    """A constant that may be fitted."""

    name: str
    """A key of :func:`constants_of`."""
    unit: str
    sheet: float
    """Value in the data sheets, in ``unit``, where the fit starts."""
    low: float
    """Lower bound of the fit. It is above zero, because the fit is over logarithms."""
    high: float
    source: str
    """Source of ``sheet``, as the page states it."""
    bounds: str
    """Reason for ``low`` and ``high``, as the page states it."""


LASSEN = (
    FittedConstant(
        "flops", "FLOP/s", 15.7e12, 7.85e12, 15.7e12, "NVIDIA V100 SXM2 data sheet, fp32 peak", "0.5-1 of it"
    ),
    FittedConstant("bandwidth", "B/s", 900e9, 450e9, 900e9, "NVIDIA V100 data sheet, HBM2 peak", "0.5-1 of it"),
    FittedConstant(
        "kernel", "s", 10e-6, 2e-6, 30e-6, "assumed", "a bare launch; three launches of 10 us for one operation"
    ),
    FittedConstant(
        name="small",
        unit="elements",
        sheet=163840,
        low=163840,
        high=64 * 163840,
        source="NVIDIA V100 architecture paper, 80 multiprocessors x 2048 resident threads",
        bounds="1-64 results per resident thread (256 threads on a tile of 128 x 128)",
    ),
    FittedConstant(
        "collective step", "s", 10e-6, 1e-6, 200e-6, "assumed", "the wire's; a message staged through both hosts"
    ),
)
"""Constants that are fitted for Lassen."""


def constants_of(machine: Machine) -> dict[str, float]:
    """Return the machine's values of all constants that can be fitted, by name.

    Only the first entry of ``machine.compute`` counts. ``"small"`` is the number of elements that fill a GPU, and
    ``"collective step"`` the seconds of one step of an all-reduce over the network.
    """
    roofline = machine.compute[0].roofline
    return {
        "flops": roofline.flops_per_s,
        "bandwidth": roofline.bytes_per_s,
        "kernel": roofline.kernel_s,
        "small": roofline.small,
        "collective step": machine.network.collective_s,
    }


def with_constants(machine: Machine, values: Mapping[str, float]) -> Machine:
    """Return the machine with other values of some constants (see :func:`constants_of`).

    Parameters
    ----------
    machine : Machine
    values : mapping of str to float
        New values by name.

    Returns
    -------
    Machine
    """
    all_values = constants_of(machine) | dict(values)
    network = replace(machine.network, step_s=all_values["collective step"])
    return with_roofline(
        replace(machine, network=network),
        flops_per_s=all_values["flops"],
        bytes_per_s=all_values["bandwidth"],
        kernel_s=all_values["kernel"],
        small=all_values["small"],
    )


def with_roofline(machine: Machine, **values: float) -> Machine:
    """Return the machine with other values of fields of its roofline.

    Parameters
    ----------
    machine : Machine
    **values
        New values by name.

    Returns
    -------
    Machine
    """
    entry = machine.compute[0]
    roofline = replace(entry.roofline, **values)
    return replace(machine, compute=(replace(entry, roofline=roofline), *machine.compute[1:]))


def from_data_sheets(machine: Machine, constants: Sequence[FittedConstant] = LASSEN) -> Machine:
    """Return the machine before calibration, with constants from data sheets.

    Parameters
    ----------
    machine : Machine
    constants : sequence of FittedConstant
        Constants to reset.

    Returns
    -------
    Machine
    """
    return with_constants(machine, {constant.name: constant.sheet for constant in constants})


def calibrate(
    machine: Machine, cells: Sequence[PublishedTime], predict: Predict, constants: Sequence[FittedConstant] = LASSEN
) -> Machine:
    """Fit constants of a machine to published times.

    Least squares over the logarithms of predicted over measured times, and of the ratios of speed-ups.

    Parameters
    ----------
    machine : Machine
    cells : sequence of PublishedTime
        Published times, with the first cell of each of their rows.
    predict : Predict
        Predicts the times.
    constants : sequence of FittedConstant
        Constants to fit.

    Returns
    -------
    Machine
    """

    def at(point: Array) -> Machine:
        # Logarithms, because the constants differ by 18 orders of magnitude, and a relative change of each matters.
        values = np.exp(point)
        return with_constants(machine, {c.name: float(v) for c, v in zip(constants, values, strict=True)})

    fit = least_squares(
        lambda point: _residuals(at(point), cells, predict),
        np.log([constant.sheet for constant in constants]),
        bounds=(np.log([c.low for c in constants]), np.log([c.high for c in constants])),
        # The predictions have kinks, where another algorithm becomes the cheapest. A wider step looks across them.
        diff_step=1e-3,
        ftol=1e-3,
        xtol=1e-4,
    )
    return at(fit.x)


def _residuals(machine: Machine, cells: Sequence[PublishedTime], predict: Predict) -> Array:
    # Speed-ups in addition to times, because the page compares speed-ups. An error common to a row cancels in them.
    times = {cell: np.log(predict(machine, cell) / cell.time_s) for cell in cells}
    base = {(cell.table, cell.samples): time for cell, time in times.items() if cell.is_base}
    speedups = [base[cell.table, cell.samples] - time for cell, time in times.items() if not cell.is_base]
    return np.array([*times.values(), *speedups])


# -- Amdahl's law -----------------------------------------------------------------------------------------------------


def amdahl(serial: float, group: int, base_group: int = 1) -> float:
    """Return the speed-up of ``group`` GPUs over ``base_group`` GPUs by Amdahl's law.

    Parameters
    ----------
    serial : float
        Fraction of the work that does not get faster.
    group : int
        Number of GPUs.
    base_group : int
        Number of GPUs of the reference.

    Returns
    -------
    float

    Examples
    --------
    >>> amdahl(0.0, 16, 2), amdahl(1.0, 16, 2), round(amdahl(0.1, 4), 3)
    (8.0, 1.0, 3.077)
    """
    return _speedup_over_one(serial, group) / _speedup_over_one(serial, base_group)


def _speedup_over_one(serial: float, group: int) -> float:
    return 1 / (serial + (1 - serial) / group)


def fit_amdahl(cells: Sequence[PublishedTime]) -> float:
    """Return the serial fraction for which Amdahl's law has the least mean absolute error over ``cells``."""

    def mean_error(serial: float) -> float:
        return float(np.mean([abs(amdahl(serial, c.group, c.base_group) / c.speedup - 1) for c in cells]))

    return float(minimize_scalar(mean_error, bounds=(0, 1), method="bounded").x)

"""BaPipe's Tables I and II: the paper's formulas, the closed forms and the event simulation, for equal stages.

The last row of the tables is the bandwidth that a schedule requires to hide its messages. Here it is searched for: the
longest transfer with which one more micro-batch still takes F + B.

Source: Zhao et al. 2020 (BaPipe), Tables I and II.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from distconv.jobs.papers.printed_tables import Rows
from distconv.perfmodel.stages.closed_forms import SCHEDULES, in_flight, minibatch_time
from distconv.pipeline import schedule, simulate

STAGES, MICROBATCHES = 4, 16
FORWARD, BACKWARD, TRANSFER = 1.0, 2.0, 0.5
"""Seconds of F, B and SR of a micro-batch, equal on all stages."""

DEMANDS = {"1f1b-as": FORWARD, "fbp-as": (FORWARD + BACKWARD) / 2, "1f1b-sno": FORWARD, "1f1b-so": FORWARD}
"""Seconds of the longest transfer that each schedule hides, by the paper's bandwidth for a bytes (a/F or 2a/(F+B))."""

_PRECISION = 1e-6
"""Seconds to which :func:`longest_hidden` is exact."""


def schedules_table() -> Rows:
    """Print the time, the stored features and the longest hidden transfer of each schedule. Return the rows."""
    print(
        f"\nTables I and II: N={STAGES}, M={MICROBATCHES}, F={FORWARD:g} s, B={BACKWARD:g} s, SR={TRANSFER:g} s;",
        end="",
    )
    print(" the paper's formula, closed form, simulated")
    print(f"{'schedule':<10}{'mini-batch s':<22}{'features of stage 1, a':<24}longest transfer hidden, s")
    return [_row(name) for name in DEMANDS]


def _row(name: str) -> dict[str, object]:
    times = _published_time(name), closed_form(name, TRANSFER), simulated(name, TRANSFER)
    peak = simulate(schedule(name, STAGES, MICROBATCHES), FORWARD, BACKWARD).peak_activations[0]
    features = SCHEDULES[name].copies * STAGES, in_flight(name, STAGES, MICROBATCHES)[0], peak
    demands = DEMANDS[name], *(longest_hidden(name, time) for time in (closed_form, simulated))
    columns = [", ".join(f"{value:.4g}" for value in values) for values in (times, features, demands)]
    print(f"{name:<10}{columns[0]:<22}{columns[1]:<24}{columns[2]}")
    return {"schedule": name, "time_s": times, "features": features, "longest_transfer_s": demands}


def _published_time(name: str) -> float:
    """Return the seconds of a mini-batch by the formula of Table I or II."""
    n, m = STAGES, MICROBATCHES
    # Messages that do not overlap, in units of 2 SR. Asynchronous schedules (Table I) have none.
    exposed = {"1f1b-sno": n + m - 2 - math.ceil((m - 1) / n), "1f1b-so": n - 1}
    return (m + n - 1) * (FORWARD + BACKWARD) + exposed.get(name, 0) * 2 * TRANSFER


def closed_form(name: str, transfer: float, microbatches: int = MICROBATCHES) -> float:
    """Return the seconds of a mini-batch by the closed form of the performance model.

    Parameters
    ----------
    name : str
        Schedule.
    transfer : float
        Seconds of a message.
    microbatches : int

    Returns
    -------
    float
    """
    equal = [FORWARD] * STAGES, [BACKWARD] * STAGES, [transfer] * (STAGES - 1)
    return minibatch_time(name, *equal, microbatches)


def simulated(name: str, transfer: float, microbatches: int = MICROBATCHES) -> float:
    """Return the seconds of a mini-batch by simulation.

    Parameters
    ----------
    name, transfer, microbatches
        As in :func:`closed_form`.

    Returns
    -------
    float
    """
    return simulate(schedule(name, STAGES, microbatches), FORWARD, BACKWARD, transfer=transfer).makespan


def longest_hidden(name: str, time: Callable[[str, float, int], float]) -> float:
    """Return the longest transfer with which more micro-batches take F + B each, by bisection.

    Parameters
    ----------
    name : str
        Schedule.
    time : callable
        Seconds of a mini-batch: :func:`closed_form` or :func:`simulated`.

    Returns
    -------
    float
    """
    low, high = 0.0, 4 * (FORWARD + BACKWARD)
    while high - low > _PRECISION:
        middle = (low + high) / 2
        # The difference of two mini-batches has neither the filling nor the draining of the pipeline in it.
        more = time(name, middle, 3 * MICROBATCHES) - time(name, middle, MICROBATCHES)
        hidden = more <= 2 * MICROBATCHES * (FORWARD + BACKWARD) + _PRECISION
        low, high = (middle, high) if hidden else (low, middle)
    return low

"""Tables 4 to 6: seconds of an epoch of the RNN and of the GRU, with BP and with the scan, and the paper's.

An epoch is as many training steps as the paper's data have batches; some steps are timed, on random values of the same
shape. The forward pass alone has no gradients to wait for; with the scan it also keeps what the Jacobians need. On a
GPU, where calls from Python cost more than most kernels, both backward algorithms are timed as one CUDA graph, too.

Source: BPPSA, 4.1, 4.2, table 3 and appendix G: tables 4 to 6, on a V100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import nn

from distconv.jobs.bench import report
from distconv.jobs.papers.printed_tables import Rows
from distconv.jobs.sequence.trainer import LAYERS, SequenceNetwork
from distconv.jobs.timing import CPU, time_interleaved, timed_variants

HIDDEN, CLASSES = 20, 10
"""Size of the hidden state (4.1, 4.2), and number of classes (4.1)."""

RATES = {"rnn": 1e-5, "gru": 3e-4}
"""Learning rate of Adam by layer (4.1, 4.2)."""
BITSTREAMS, IRMAS = 32_000, 6_705
"""Samples of an epoch. For IRMAS, the paper does not state the number; this is the size of the training set."""

COLUMNS = {
    "FP": ("autograd", False),
    "baseline": ("autograd", True),
    "FP, scan": ("blelloch", False),
    "BPPSA": ("blelloch", True),
    "auto": ("auto", True),
}
"""Backward algorithm of each column, and True if the column includes the backward pass. ``auto`` selects one."""

GRAPHS = {"graph": "baseline", "graph, scan": "BPPSA"}
"""Further columns on a GPU, with forward and backward pass of another column replayed as a CUDA graph."""

WARM_UP = 3
"""Runs of an action before it is recorded as a CUDA graph."""


@dataclass(frozen=True)
class EpochSetting:
    """A row of a table, with the paper's seconds: forward alone, baseline, forward with the scan's overhead, BPPSA."""

    name: str
    model: str
    """Recurrent layer, ``"rnn"`` or ``"gru"``."""
    steps: int
    """Time steps of a sequence."""
    batch: int
    values: int
    """Input values of a time step."""
    published: tuple[float, float, float, float]


def _rnn(steps: int, batch: int, forward: float, baseline: float, scan: float) -> EpochSetting:
    # Tables 4 and 5 have no column for the forward pass with the scan's overhead, so the forward pass alone is used.
    return EpochSetting(f"T={steps} B={batch}", "rnn", steps, batch, 1, (forward, baseline, forward, scan))


TABLES: Mapping[str, Sequence[EpochSetting]] = {
    "table-4": (
        _rnn(10, 16, 1.57, 4.49, 4.24),
        _rnn(30, 16, 2.13, 5.5, 4.91),
        _rnn(100, 16, 3.82, 8.87, 6.64),
        _rnn(300, 16, 8.79, 18.49, 11.71),
        _rnn(1000, 16, 25.86, 53.33, 29.29),
        _rnn(3000, 16, 75.33, 157.11, 79.48),
        _rnn(10000, 16, 250.28, 510.13, 265.02),
        _rnn(30000, 16, 748.99, 1557.94, 764.31),
    ),
    "table-5": (
        _rnn(1000, 256, 2.13, 4.02, 3.72),
        _rnn(1000, 128, 3.87, 7.96, 5.49),
        _rnn(1000, 64, 7.51, 14.77, 9.27),
        _rnn(1000, 32, 13.62, 29.51, 15.0),
        _rnn(1000, 16, 25.86, 53.33, 29.29),
        _rnn(1000, 8, 51.29, 102.77, 56.37),
        _rnn(1000, 4, 100.55, 209.67, 112.23),
        _rnn(1000, 2, 200.65, 409.33, 227.13),
    ),
    "table-6": tuple(
        EpochSetting(f"{name} {steps}x{values} B={batch}", "gru", steps, batch, values, published)
        for name, steps, values, by_batch in (
            (
                "S",
                259,
                38,
                {16: (1.66, 3.71, 2.1, 2.94), 32: (0.91, 1.9, 1.09, 1.48), 64: (0.52, 1.0, 0.62, 0.82)},
            ),
            (
                "M",
                517,
                24,
                {16: (3.21, 6.19, 3.52, 4.2), 32: (1.73, 3.3, 1.83, 2.22), 64: (0.86, 1.82, 1.18, 1.2)},
            ),
            (
                "L",
                1034,
                12,
                {16: (5.78, 11.43, 6.06, 6.91), 32: (3.04, 6.09, 3.23, 3.57), 64: (1.64, 3.19, 2.13, 2.33)},
            ),
        )
        for batch, published in by_batch.items()
    ),
}


def table(name: str, settings: Sequence[EpochSetting], device: torch.device = CPU) -> Rows:
    """Print a row for each setting: seconds of an epoch, and the speed-up of the scan over BP.

    Parameters
    ----------
    name : str
        Name of the table.
    settings : sequence of EpochSetting
    device : torch.device

    Returns
    -------
    list of dict
    """
    on = f"{torch.get_num_threads()} thread(s)" if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(f"\n{report.heading(f'{name}: seconds of an epoch, float32, {on}')}")
    print("least of 3 to 50 steps, times as many as an epoch has; ratios: baseline / BPPSA; the paper's are a V100's")
    names = [*COLUMNS, *(GRAPHS if device.type == "cuda" else ())]
    columns = "".join(f"{column:>12}" for column in names)
    ratio = f"{'graphs':>8}" if device.type == "cuda" else ""
    print(f"{'':<16}{columns}{'all':>8}{'paper':>7}{'backward':>10}{'paper':>7}{ratio}")
    return [_row(setting, device) for setting in settings]


def _row(setting: EpochSetting, device: torch.device) -> dict[str, object]:
    epoch = -(-(BITSTREAMS if setting.model == "rnn" else IRMAS) // setting.batch)
    actions = {column: step_of(setting, method, device, back=back) for column, (method, back) in COLUMNS.items()}
    if device.type == "cuda":
        actions |= {name: step_of(setting, COLUMNS[of][0], device, graph=True) for name, of in GRAPHS.items()}
    # Fewer rounds of longer steps, so that all rows take about the same time.
    rounds = max(3, min(50, 10**5 // (setting.steps * setting.batch)))
    times = time_interleaved(MPI.COMM_SELF, timed_variants(actions, device), rounds)
    # The shortest of all: anything else that runs on the machine can only make a step longer.
    seconds = {column: epoch * min(step_times) for column, step_times in times.items()}
    ours = ratios(*(seconds[column] for column in ("FP", "baseline", "FP, scan", "BPPSA")))
    theirs = ratios(*setting.published)
    shown = "".join(f"{value:>12.2f}" for value in seconds.values())
    ratio_columns = "".join(f"{a:>{w}.2f}{b:>7.2f}" for a, b, w in zip(ours, theirs, (8, 10), strict=True))
    graphs = f"{seconds['graph'] / seconds['graph, scan']:>8.2f}" if device.type == "cuda" else ""
    print(f"{setting.name:<16}{shown}{ratio_columns}{graphs}", flush=True)
    return {"setting": setting.name, "epoch_s": seconds, "ratio": ours, "published_s": setting.published}


def ratios(forward: float, baseline: float, scan_forward: float, scan: float) -> tuple[float, float]:
    """Return the speed-ups of an epoch and of its backward passes by the scan.

    Parameters
    ----------
    forward : float
        Seconds of an epoch's forward passes with BP.
    baseline : float
        Seconds of an epoch with BP, forward and backward.
    scan_forward : float
        Seconds of an epoch's forward passes with the scan.
    scan : float
        Seconds of an epoch with the scan, forward and backward.

    Returns
    -------
    (float, float)
        The second one is NaN if the scan's backward passes took no time.

    Examples
    --------
    >>> ratios(1.66, 3.71, 2.1, 2.94)
    (1.2619047619047619, 2.4404761904761907)
    """
    # Backward passes by subtraction, as in appendix G.
    backward = scan - scan_forward
    return baseline / scan, (baseline - forward) / backward if backward > 0 else float("nan")


def step_of(
    setting: EpochSetting, method: str, device: torch.device = CPU, *, back: bool = True, graph: bool = False
) -> Callable[[], object]:
    """Return a function that takes a training step.

    Parameters
    ----------
    setting : EpochSetting
    method : str
        Backward algorithm.
    device : torch.device
    back : bool
        False leaves out the backward pass.
    graph : bool
        True records the passes as a CUDA graph first.

    Returns
    -------
    callable
    """
    torch.manual_seed(0)
    layer = LAYERS[setting.model](setting.values, HIDDEN, batch_first=True, method=method)
    model: nn.Module = SequenceNetwork(layer, CLASSES).to(device)
    optimizer = torch.optim.Adam(model.parameters(), RATES[setting.model])
    x = torch.randn(setting.batch, setting.steps, setting.values + 1, device=device)
    # The last channel of SequenceNetwork's input marks the last step of each sequence.
    x[..., -1] = torch.arange(setting.steps, device=device) == setting.steps - 1
    labels = torch.randint(CLASSES, (setting.batch,), device=device)

    def gradients() -> torch.Tensor:
        loss = F.cross_entropy(model(x), labels)
        if back:
            optimizer.zero_grad()
            loss.backward()
        return loss.detach()

    # The optimizer's step is not recorded: the paper's method changes the passes only.
    compute_gradients = _recorded(gradients) if graph else gradients

    def step() -> object:
        loss = compute_gradients()
        if back:
            optimizer.step()
        return loss

    return step


def _recorded(action: Callable[[], object]) -> Callable[[], object]:
    """Record an action as a CUDA graph, after warm-up on another stream, as torch requires."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UP):
            action()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The graph reads the tensors that the action refers to, at their addresses. So the action is kept as well.
        held = action(), action

    def replay() -> object:
        graph.replay()
        return held[0]

    return replay

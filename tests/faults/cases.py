"""Faults and bad input by number: what has to happen, and which tests carry which number.

A test that shows a case has ``@pytest.mark.fault(number, ...)``. "All" in a case: every rank raises the same
``DistconvError`` and the communicator works afterwards. A number behind "code" is the exit code of the job.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CASES = {
    # Configuration and shapes.
    1: "a grid that is not as large as its communicator: all",
    2: "a grid with an extent below 1: all",
    3: "another grid on each rank: all",
    4: "a halo wider than the neighbour's block: exact",
    5: "a kernel larger than the block: exact",
    6: "a kernel larger than the padded input: all, in torch's words",
    7: "a stride that does not divide the blocks' offsets: exact",
    8: "uneven blocks: exact",
    9: "ranks without rows: exact, with empty gradients",
    10: "fewer samples than ranks: exact",
    11: "a dilated kernel wider than the block: exact",
    12: "an operator without a distributed rule: all, before any message",
    13: "groups that do not divide over the channels' ranks: exact",
    14: "pooling windows across a border, with ceil_mode: exact",
    15: "batch statistics over split dimensions: exact; of one value per channel: all, in torch's words",
    16: "another global shape on one rank: all",
    17: "another dtype on one rank: all",
    18: "another device on one rank: all",
    19: "memory in any order: the bits of contiguous memory",
    20: "sums in bfloat16: those of float32, rounded once",
    21: "messages and sums of more than 2^31 bytes and elements: whole",
    22: "other weights on one rank: all, or those of rank 0 if asked",
    23: "other layers on one rank: all",
    24: "a layer that one rank skips: all, naming both operators, code 70; unchecked, code 75",
    25: "fewer batches on one rank: code 75; a loader has as many everywhere",
    26: "redistribution between any two layouts: bit by bit; to one that cannot be: all",
    27: "pipelines: uneven micro-batches and stages without weights are exact; more stages than ranks: all",
    28: "a freed communicator, MPI not begun or ended: an error where it is noticed",
    # Plans.
    29: "a plan for other ranks, another model or of another version: all, naming both",
    30: "another plan on one rank: all",
    31: "a plan file that is cut, too large or nonsense: all",
    # Data.
    32: "a file that is missing, a folder, forbidden or empty, on one rank too: all",
    33: "a file that was cut: all",
    34: "a flipped bit under a checksum: all",
    35: "a dataset of another shape, type or kind: all",
    36: "a file that a writer holds open: read, or all",
    37: "a file that changes between epochs: all",
    38: "samples or labels that cannot be: all, naming the first",
    39: "a read error on one rank: all, in its step",
    # Numbers.
    40: "a loss that is not finite on one rank: all, in that step; weights and checkpoints stay",
    41: "an infinite gradient on one rank: the step is skipped on all",
    42: "replicas that come apart: all, naming the rank",
    43: "the same run twice: the same bits",
    44: "other grids: the same losses to rounding, in float64 and float32",
    # Processes.
    45: "an exception on one rank, wherever: code 1 within seconds, with its traceback and rank",
    46: "sys.exit on one rank: that code, or 75 if others wait for it",
    47: "a rank that is gone with an error code (os._exit(5)): that code, at once",
    48: "a killed rank, wherever: the job ends within seconds, not with 0",
    49: "a stopped rank: code 75, and a report that names it",
    50: "SIGTERM or SIGUSR1 to any rank: a checkpoint, then code 143",
    51: "SIGINT twice: the job ends within seconds",
    52: "a killed launcher: no rank lives on",
    53: "a rank out of memory: code 1, naming layer and bytes",
    54: "an MPI that takes no device memory: through the host; if it was forced to: an error",
    55: "more ranks than cores: the cores are shared out, and waiting takes none",
    # Checkpoints.
    56: "killed anywhere in a save: the newest complete checkpoint is found and whole",
    57: "what an interrupted save left: does not stand in the way",
    58: "a full disk: all; the earlier checkpoint is whole and training may go on",
    59: "other errors of a disk: the same",
    60: "a folder that cannot be written: all, before any step",
    61: "a file that was cut anywhere: found; the one before is taken if asked for",
    62: "a flipped bit anywhere: found; the same",
    63: "files missing, swapped or of another step: all",
    64: "a checkpoint of another model: all, listing every difference, unless names may differ",
    65: "pieces that do not cover their tensor: all",
    66: "going on with the same ranks: bit by bit",
    67: "going on with other ranks, grids and stages: loaded bit by bit, the same losses to rounding",
    68: "a checkpoint of another dtype: all, unless it is asked for",
    69: "from a GPU to the CPU and back: bit by bit",
    70: "an older format: loaded; a newer one: all",
    71: "files made to do harm: refused at once; nothing is run, no other file read",
    72: "two jobs with one folder: the second is refused",
    73: "a checkpoint that not all ranks see: waited for, then all",
    74: "old checkpoints: deleted behind the new one's commit",
    75: "a clock that went back: the order of the commits decides which is newest",
    76: "a run that begins anew beside later steps: what it saves is kept and is the newest, and it says so",
    77: "damaged checkpoints: do not count among those that are kept",
    78: "links and pipes where we write: replaced or refused, never followed",
    79: "a manifest that somebody made up: all, and passed over if asked for",
    80: "small files that claim much, have no end or are pipes: refused before they cost memory or time",
    81: "a folder without a checkpoint: all, unless that is allowed",
    82: "state that an optimizer's next step needs and that is not there: all, before anything changes",
    83: "values that JSON cannot represent: all, naming the place",
    84: "values that the model's dtype cannot hold: all",
    85: "a file that cannot be written, whoever writes it: named; the old one stays and nothing is beside it",
    86: "a link that takes a folder's place while we write: nothing goes there",
    87: "sounds that claim what is not there, or lead elsewhere: all",
    88: "a reader that has had enough: the command ends without a word",
    # Operators and commands.
    89: "commands, modules and arguments that are none: code 2, in one line",
    90: "a distributed tensor as the memory of a plain one: the whole of it, or all",
    91: "the memory of a distributed tensor, asked for from outside: all",
    92: "values that an operator cannot take, on one rank: all",
    93: "NaN that a backward pass is to look for, on one rank: all",
    94: "the gradient at an edge of the graph: the whole tensor's",
    95: "gradients in half precision: as near as torch's",
    # GPUs.
    96: "a rank on which NCCL cannot begin: all through MPI, with a warning; if it was forced to: all",
    97: "an MPI that does not carry the device memory it says it takes, on one rank: all",
    98: "a peer lost under NCCL, or that does not come: an error where it is waited for, or code 75",
    99: "a device that is not there: code 2, in one line",
    100: "a tensor on another GPU than its rank's first: an error that names both",
    # Ranks that part.
    101: "a rank that comes to its end while others wait for it: the job ends within seconds, naming it",
    102: "an error that all ranks raise: told once, by rank 0, with the lines of the user alone",
    103: "an environment variable that differs between ranks: all, at the first grid",
    104: "a weight that comes apart on one rank: all, within 10 steps, naming the weight and the ranks",
    105: "another batch on one rank, at any step: all, within 10 steps",
    # The process.
    106: "MPI that begins after the import: looked after from the first grid on",
    107: "memory that is kept: at most a tenth more than malloc left alone",
    108: "schedules of too many passes: code 2, before anything is simulated",
    109: "stages that are not as many as the ranks' chunks: all, with the number that would be",
    110: "a data file that its user has open, too: both read",
    111: "ranks that import distconv at another time, or never: nobody waits for them",
    112: "worker processes that import the script again: start no MPI; one that makes a grid gets an error",
    113: "a rank that is elsewhere while others wait: named with its line after 30 s, and with all stacks at the end",
}


def carriers() -> dict[str, tuple[int, ...]]:
    """The tests, as ``tests/path.py::name``, and the cases that their marker ``fault`` names."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.fault(" in text:
            for test in ast.parse(text).body:
                numbers = _marked(test) if isinstance(test, ast.FunctionDef) else ()
                if isinstance(test, ast.FunctionDef) and numbers:
                    found[f"{path.relative_to(ROOT)}::{test.name}"] = numbers
    return found


def _marked(test: ast.FunctionDef) -> tuple[int, ...]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
            return tuple(ast.literal_eval(number) for number in mark.args)
    return ()

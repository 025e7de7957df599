"""Run your own Python script with the allocator that distconv's commands use.

The allocator keeps freed memory for the next step (``distconv info`` names it). A script that imports distconv itself
cannot select it any more, so Python is started again. Everything else is as with ``python train.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from pathlib import Path

from mpi4py import MPI
from mpi4py.run import set_abort_status

from distconv.errors import DataError
from distconv.process import endings

EXAMPLES = """\
examples:
  mpiexec -n 4 distconv run train.py --epochs 10
  srun -n 64 distconv run -m project.train
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``distconv run``."""
    parser.add_argument("-m", action="store_true", dest="module", help="run SCRIPT as a module, as python -m does")
    parser.add_argument("script", metavar="SCRIPT", help="Python file to run, or the name of a module with -m")
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENTS",
        help="arguments of the script: everything after its name",
    )


def run(options: argparse.Namespace) -> int:
    """Run the script in this process. Its exceptions have the same effect as with ``python``.

    Raises
    ------
    DataError
        If there is no such file or module.
    """
    if not options.module and not Path(options.script).is_file():
        raise DataError(
            f"{options.script}: no such file. Name an existing file, or put -m before the name of a module."
        )
    sys.argv = [options.script, *options.arguments]
    # As python does: the folder of the script, or with -m the current one.
    sys.path.insert(0, "" if options.module else str(Path(options.script).resolve().parent))
    if options.module and not _is_module(options.script):
        raise DataError(
            f"{options.script}: no such module in this folder or installed. Name an existing module, or leave "
            "-m out for a file."
        )
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.script, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # with a traceback, even for errors that distconv's commands print in one line
        _end_others(1)
        return 1
    except SystemExit as exit_asked:
        _end_others(exit_asked)
        raise
    return 0


def _end_others(status: int | SystemExit) -> None:
    """Abort the job if this rank fails before its first grid, since MPI_Finalize would wait for all ranks."""
    if MPI.COMM_WORLD.size > 1 and not endings.is_installed():
        set_abort_status(status)


def _is_module(name: str) -> bool:
    """Return True if the module ``name`` exists. Its parent packages are imported, as ``python -m`` does."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # A package that is missing inside a parent package is an error of the script.
        return not f"{name}.".startswith(f"{error.name}.")

"""Ends all ranks when distconv is imported if an environment variable of any of them is bad; a command in one line."""

from __future__ import annotations

import sys

from mpi4py import MPI

from distconv.errors import BAD_INPUT, EnvironmentVariableError
from distconv.process import command_start, environment

_WORLD = MPI.COMM_WORLD if MPI.Is_initialized() and not MPI.Is_finalized() else None

try:
    environment.check(_WORLD)
except EnvironmentVariableError as error:
    if not command_start.is_command(sys.orig_argv[1:]):
        raise
    if _WORLD is None or _WORLD.rank == 0:
        print(f"distconv: {error}", file=sys.stderr, flush=True)
    sys.exit(BAD_INPUT)

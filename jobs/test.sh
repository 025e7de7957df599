#!/usr/bin/env bash
# Installs the extras test and docs, and runs every check: ruff, mypy, then all tests serially and on 1, 2, 3, 4, 6 and 8 ranks.
#   jobs/test.sh --quick                   something of every folder, serially and on 2 and 3 ranks
#   jobs/test.sh layers/nn                 what mirrors a folder or a module, on all rank counts
#   jobs/test.sh --ranks 2,4 -k grid       other arguments go to tests/run.py too
# See environment.sh for the variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

stage "installation" install test,docs editable

# The checks take seconds and come first; the tests run whatever they said, and print their totals last.
checks=0
stage "ruff check" "$venv/bin/ruff" check . || checks=1
stage "ruff format" "$venv/bin/ruff" format --check . || checks=1
stage "mypy" "$venv/bin/mypy" || checks=1
[ "$checks" = 0 ] || echo "== ruff or mypy found something: this run fails whatever the tests say"

echo "== tests"
"$venv/bin/python" tests/run.py "$@" || checks=1
exit "$checks"

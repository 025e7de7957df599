#!/usr/bin/env bash
# Install the extras test and docs, and run the checks: ruff, mypy, and tests serially and on 2, 3 and 4 ranks.
#   jobs/test.sh                           tests of less than a second: all serial cases, four cases of each on ranks
#   jobs/test.sh --full                    all tests but those marked slow, also on 6 and 8 ranks
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

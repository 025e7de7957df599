#!/usr/bin/env bash
# One wheel on three MPI libraries: the same digest of trained weights.  packaging/check_mpis.sh WHEEL FOLDER (Debian, apt)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wheel=$(realpath "$1")
mkdir -p "$2" && cd "$2"
for name in wheels site; do python3 -m venv "$name"; done
wheels/bin/pip install -q -c "$here/../constraints.txt" "$wheel[mpich]"
site/bin/pip install -q -c "$here/../constraints.txt" "$wheel"

# Debian's MPICH beside what is installed, under the name that mpi4py looks for.
apt-get download mpich libmpich12 libucx0 libhwloc15 libslurm38
for package in *.deb; do dpkg -x "$package" debian; done
library=$(dirname "$(realpath debian/usr/lib/*/libmpich.so.12)")
ln -sf libmpich.so.12 "$library/libmpi.so.12"

wheels/bin/mpiexec -n 2 wheels/bin/python "$here/training.py" | tee mpich-wheel.txt
LD_LIBRARY_PATH=$library MPI4PY_MPIABI=mpich debian/usr/bin/mpiexec.hydra -n 2 site/bin/python "$here/training.py" | tee mpich.txt
mpiexec.openmpi --allow-run-as-root --oversubscribe -n 2 site/bin/python "$here/training.py" | tee openmpi.txt
[ "$(grep -ho 'digest .*' mpich-wheel.txt mpich.txt openmpi.txt | sort -u | wc -l)" = 1 ] && echo "the same digest"

#!/usr/bin/env bash
# From a machine with Python alone to a trained network: install, make data, train on 4 ranks. See environment.sh for
# the variables that it reads.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

out=runs/quickstart
ranks() { "$venv/bin/mpiexec" "${launcher[@]}" -n "$1" "$venv/bin/distconv" "${@:2}"; }

data=(data mesh --size 128 --samples 48 --out "$out/mesh.h5")
train=(train mesh --data "$out/mesh.h5" --model unet --grid n=2,h=2 --out "$out" --overwrite --baselines)

mkdir -p "$out"
stage "installation" install mesh,plot,allocator
stage "data (48 samples of 128 x 128 cells, 2 ranks)" ranks 2 "${data[@]}"
stage "training (U-Net, 4 ranks, grid n=2,h=2)" ranks 4 "${train[@]}"

echo "== the picture (input, label, prediction, loss curve):"
find "$root/$out" -name '*.png' -newer "$out/mesh.h5"

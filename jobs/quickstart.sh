#!/usr/bin/env bash
# From a machine with Python alone to a trained network: install, make data, train on 2 ranks, or on 4 where there are as
# many cores. See environment.sh for the variables that it reads; an argument is the seed of the flows and of the network.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

seed=${1:-0}
out=runs/quickstart${1:+-$1}
ranks() { "$venv/bin/mpiexec" "${launcher[@]}" -n "$1" "$venv/bin/distconv" "${@:2}"; }

cores=$(nproc)
simulating=$((cores < 2 ? 2 : cores > 16 ? 16 : cores))
training=2 grid=h=2
[ "$cores" -lt 4 ] || training=4 grid=n=2,h=2
data=(data mesh --size 128 --samples 72 --out "$out/mesh.h5" --seed "$seed")
train=(train mesh --data "$out/mesh.h5" --model unet --width 8 --grid "$grid" --epochs 60 --out "$out"
    --overwrite --baselines --seed "$seed")

echo "Times in brackets are those of a machine with 2 cores."
mkdir -p "$out"
stage "1 of 3: install distconv and what it needs into $venv (1 minute)" install mesh,plot,allocator
stage "2 of 3: simulate some 50 flows on $simulating ranks: 72 samples of 128 x 128 cells, 24 held out (1.5 minutes)" \
    ranks "$simulating" "${data[@]}"
stage "3 of 3: train a U-Net on $training ranks, grid $grid, to find the cells that will tangle, and baselines (2.5 minutes)" \
    ranks "$training" "${train[@]}"

echo "== the picture (input, label, prediction, loss, precision by recall):"
find "$root/$out" -name '*.png' -newer "$out/mesh.h5"

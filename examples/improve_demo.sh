#!/bin/sh
# A policy that improves on its own experience, beside honest baselines: under five minutes on two cores, no GPU, no download.
# `make demo` calls this; the folder of the run is runs/demo, or the one that is given.
# A second call does only what is missing; remove the folder to start anew.
set -eu
cd "$(dirname -- "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1
exec regrasp improve examples/demo_recipe.yaml --output "${1:-runs/demo}" --workers 2

#!/bin/sh
# A policy that improves on its own experience, beside honest baselines: about five minutes on two cores, no GPU, no download.
# A second call does only what is missing; remove runs/improve to start anew.
set -eu
cd "$(dirname -- "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=1
exec regrasp improve examples/demo_recipe.yaml --output runs/improve --workers 2

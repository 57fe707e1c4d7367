#!/bin/sh
# From recordings to advantage labels: two small datasets are made, then every stage runs over them. `make demo-labels` calls this.
set -eu
cd "$(dirname -- "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
out=runs/labels

step() {
    printf '\n$ %s\n' "$*"
    "$@"
}

rm -rf "$out"
step python examples/make_dataset.py "$out"
set -- --demos "$out/demos" --rollouts "$out/rollouts"
step regrasp inspect "$out/demos" "$out/rollouts"
step regrasp returns "$@" --tag base
step regrasp value fit "$@" --returns base --output "$out/value"
step regrasp value predict "$@" --checkpoint "$out/value" --tag base
step regrasp advantages "$@" --returns base --values base --tag base_N50_q30
step regrasp relabel "$@" --source base_N50_q30 --tag base_N50_q20 --positive-fraction 0.2
printf '\nThe labels lie beside the datasets, in %s/*/meta/advantages_*.parquet.\n' "$out"

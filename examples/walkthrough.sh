#!/bin/sh
# Every stage over one real recording in both of LeRobot's layouts, as shown in docs/walkthrough.md.
#
#     sh examples/walkthrough.sh RECORDINGS OUT > log
#
# RECORDINGS holds g1_bottle_v21 and g1_bottle_v30. They are not written to: sidecars go to OUT.
set -eu
data=$1
out=$2
here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
PATH="$here/.venv/bin:$PATH"

step() {
    printf '\n$ %s\n' "$*"
    "$@" 2>&1 || printf '(exit code %s)\n' "$?"
}

rm -rf "$out"
mkdir -p "$out"
for layout in v21 v30; do
    recording="$data/g1_bottle_$layout"
    run="$out/$layout"
    printf '\n## %s, as demonstrations\n' "$layout"
    step regrasp inspect "$recording"
    set -- --demos "$recording" --sidecars "$run"
    step regrasp returns "$@" --tag base
    step regrasp value fit "$@" --returns base --output "$run/value" --holdout 0.25 --steps 600
    step regrasp value predict "$@" --checkpoint "$run/value" --tag base
    step regrasp advantages "$@" --returns base --values base --tag base_N50_q30 --no-demos-positive
    step regrasp relabel "$@" --source base_N50_q30 --tag base_N50_q20 --positive-fraction 0.2
    step regrasp inspect "$recording" --sidecars "$run"
done

printf '\n## v21, as rollouts of which three failed\n'
recording="$data/g1_bottle_v21"
set -- --rollouts "$recording" --sidecars "$out/failures"
step regrasp returns "$@" --tag base
printf 'episode_index,outcome\n0,success\n1,failure\n2,success\n3,success\n4,failure\n5,success\n6,failure\n7,success\n' > "$out/outcomes.csv"
step regrasp returns "$@" --tag base --outcomes "$out/outcomes.csv"
step regrasp value fit "$@" --returns base --output "$out/failures/value" --holdout 0.25 --steps 600
step regrasp value predict "$@" --checkpoint "$out/failures/value" --tag base
step regrasp advantages "$@" --returns base --values base --tag base_N50_q30
step regrasp relabel "$@" --source base_N50_q30 --tag base_N50_q20 --positive-fraction 0.2 --lookahead 20

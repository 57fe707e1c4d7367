"""RECAP whose outcomes come only from a judge, beside RECAP with the true ones: `python benchmarks/recap/judged.py`.

One command; every step is a `regrasp` command that is printed, is skipped once it was done with the same words, and
writes below `--output`. The judge is `frame_judge.py`, learned from other rollouts and asked over HTTP; the rollouts
that it judges are a copy without rewards, ends and outcomes. `judged_results.py` writes what came out as Markdown.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from judged_results import AGAIN, section

from regrasp.data.dataset import open_dataset
from regrasp.data.outcomes import read_outcomes

JUDGE = str(Path(__file__).resolve().with_name("frame_judge.py"))
ENVIRONMENT = "metaworld:pick-place-v3"
LIMIT = ["--max-episode-steps", "150"]
CAMERA = "front"
KEY = f"observation.images.{CAMERA}"
ARMS = {"true": "data/rollouts", "judged": "data/unlabelled"}
"""Whose outcomes count, and the rollouts that are read."""
OUTCOMES = {"true": [], "judged": ["--outcomes-tag", "learned"]}
SECRETS = ("next.reward", "next.done", "next.success")
"""Columns that tell how an episode ended."""
SUCCESS_AT = "4"
GUIDANCE = ("1.5", "3")
"""The betas that RECAP's policies are run with."""


@dataclass(frozen=True)
class Bench:
    """The folder of a run, and its size."""

    folder: Path
    known: int
    rollouts: int
    checked: int
    value_steps: int
    steps: int
    episodes: int
    seeds: list[int]

    def step(self, name: str, words: list[str], *, code_2: bool = False, server: str = "") -> None:
        """Run a command in the folder, unless the same words have been run to their end.

        Args:
            name: The step's, and its log's.
            words: The command.
            code_2: Whether to end with 2 is a result too.
            server: An address among the words that is another one each time.
        """
        done = self.folder / "steps" / f"{name}.json"
        said = shlex.join("URL" if word == server else word for word in words)
        if done.is_file() and json.loads(done.read_text())["command"] == said:
            return
        print(f"$ {said}", flush=True)
        began = time.monotonic()
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        call = [sys.executable, *(["-m", "regrasp", *words[1:]] if words[0] == "regrasp" else words[1:])]
        log = self.folder / "steps" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            code = subprocess.run(call, cwd=self.folder, env=os.environ | threads, stdout=file, stderr=file).returncode
        if code and not (code_2 and code == 2):
            raise SystemExit(f"{name} ended with {code}:\n{log.read_text()[-2000:]}")
        done.write_text(json.dumps({"command": said, "code": code, "seconds": time.monotonic() - began}))

    def regrasp(self, name: str, words: str, *more: str) -> None:
        """Run a `regrasp` command."""
        self.step(name, ["regrasp", *words.split(), *more])


def collect(bench: Bench) -> None:
    """Demonstrations, a policy that imitates them, and two sets of its rollouts with a camera."""
    bench.regrasp(
        "demos", f"demos {ENVIRONMENT} --mix slow --episodes 40 --seed 11 --workers 0 --record data/demos", *LIMIT
    )
    bench.regrasp(
        "sft", "policy fit --demos data/demos --output policies/sft --steps 3000 --seed 11 --cameras none --resume"
    )
    for name, seed, episodes in (("known", 13, bench.known), ("rollouts", 12, bench.rollouts)):
        words = f"rollout policies/sft --env {ENVIRONMENT} --seed {seed} --episodes {episodes} --copies 8 --workers 0"
        bench.regrasp(name, f"{words} --cameras {CAMERA} --record data/{name}", *LIMIT)


def hide_outcomes(source: Path, copy: Path) -> None:
    """Copy a dataset without the columns that tell how its episodes ended; nothing where it was copied before."""
    if copy.exists():
        return
    unfinished = copy.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for path in sorted(source.rglob("*")):
        to = unfinished / path.relative_to(source)
        if path.is_dir() or path.name in ("attempts.parquet", "stats.json", "recording.json"):
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            hidden = [c for c in table.column_names if c in (*SECRETS, "episode_success") or c.startswith("stats/")]
            pq.write_table(table.drop_columns(hidden), to)
        elif path.name == "info.json":
            info = json.loads(path.read_text())
            info["features"] = {name: one for name, one in info["features"].items() if name not in SECRETS}
            to.write_text(json.dumps(info, indent=4))
        else:
            os.link(path, to)
    unfinished.rename(copy)


@contextmanager
def served(bench: Bench) -> Iterator[str]:
    """The judge's address, while it serves."""
    command = [sys.executable, JUDGE, "serve", "judge.pt"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=bench.folder, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def judge(bench: Bench) -> None:
    """Learn a judge, have it judge the copy without outcomes, and check it against what really happened."""
    bench.step("judge", ["python", JUDGE, "train", "data/known", "--camera", KEY, "--output", "judge.pt"])
    hide_outcomes(bench.folder / "data/rollouts", bench.folder / ARMS["judged"])
    outcomes = read_outcomes(open_dataset(bench.folder / "data/rollouts")).by_episode
    known = list(outcomes.items())[: bench.checked]
    lines = ["episode_index,outcome", *(f"{number},{outcome.value}" for number, outcome in known)]
    (bench.folder / "truth.csv").write_text("\n".join(lines) + "\n")
    with served(bench) as url:
        asked = ["--dataset", ARMS["judged"], "--cameras", KEY, "--model", "frame-judge", "--base-url", url]
        terminal = ["regrasp", "annotate", "terminal", *asked, "--tag", "learned", "--sidecars", "sidecars/judged"]
        bench.step("annotate", terminal, server=url)
        check = ["regrasp", "annotate", "check", *asked, "--labels", "truth.csv", "--output", "check.jsonl"]
        check += ["--voc-points", "0", "--report", "check.json", "--plot", "reliability.png"]
        bench.step("check", check, code_2=True, server=url)
    words = f"outcomes --dataset {ARMS['judged']} --sidecars sidecars/judged --from terminal:learned"
    bench.regrasp("outcomes", words, "--success-at", SUCCESS_AT)


def data_of(arm: str) -> str:
    """The flags that name an arm's data."""
    return f"--demos data/demos --rollouts {ARMS[arm]} --sidecars sidecars/{arm}"


def filtered(bench: Bench, arm: str) -> None:
    """Imitate the successes alone."""
    words = f"policy fit {data_of(arm)} --cameras none --holdout 0 --steps {bench.steps} --episodes success --resume"
    name = f"filtered_bc_{arm}"
    bench.regrasp(name, f"{words} --output policies/{name} --seed {bench.seeds[0]}")
    evaluate(bench, name)


def label(bench: Bench, arm: str, tag: str, seed: int) -> None:
    """Fit a value model to an arm's returns, and label by its advantages."""
    data, value = data_of(arm), f"values/{tag}"
    fit = f"value fit {data} --returns {arm} --output {value} --cameras none --batch-size 128 --seed {seed} --resume"
    bench.regrasp(f"value_fit_{tag}", f"{fit} --steps {bench.value_steps}")
    bench.regrasp(f"value_predict_{tag}", f"value predict {data} --checkpoint {value} --tag {tag} --workers 1")
    labels = f"advantages {data} --returns {arm} --values {tag} --tag {tag} --lookahead 50 --positive-fraction 0.35"
    bench.regrasp(f"advantages_{tag}", f"{labels} --pool all --no-demos-positive")


def recap(bench: Bench, arm: str) -> None:
    """Label by advantages, and train policies that are conditioned on the labels, from several seeds.

    The true outcomes are also labelled by a second value model, so that it is known what its seed alone changes.
    """
    bench.regrasp(f"returns_{arm}", f"returns {data_of(arm)} --tag {arm}", *OUTCOMES[arm])
    label(bench, arm, arm, 11)
    policy = (
        f"policy fit {data_of(arm)} --cameras none --holdout 0 --steps {bench.steps} --condition-dropout 0.2 --resume"
    )
    for seed in bench.seeds:
        name = f"recap_{arm}_{seed}"
        bench.regrasp(name, f"{policy} --labels {arm} --output policies/{name} --seed {seed}")
        for beta in GUIDANCE:
            evaluate(bench, name, f"recap_{arm}_b{beta}_{seed}", "--guidance-scale", beta)
    if arm == "true":
        label(bench, arm, AGAIN, 12)


def imitate(bench: Bench) -> None:
    """Imitate the demonstrations for as many steps as the other policies are trained, with the first policy's seed."""
    words = f"policy fit --demos data/demos --output policies/sft_long --steps {bench.steps} --seed 11 --cameras none"
    bench.regrasp("sft_long", f"{words} --holdout 0 --resume")
    evaluate(bench, "sft_long")
    evaluate(bench, "sft")


def evaluate(bench: Bench, policy: str, result: str = "", *more: str) -> None:
    """Run a policy from initial states that are the same for all, and keep the result under a name, or the policy's."""
    words = f"evaluate policies/{policy} --env {ENVIRONMENT} --seed 11 --episodes {bench.episodes} --workers 0"
    out = f"--noise-scale 0.5 --out evaluations/{result or policy}.json"
    bench.regrasp(f"evaluate_{result or policy}", f"{words} {out}", *LIMIT, *more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench/judged"))
    parser.add_argument("--known", type=int, default=64, help="rollouts that the judge learns from")
    parser.add_argument("--rollouts", type=int, default=112, help="rollouts that are judged")
    parser.add_argument("--checked", type=int, default=112, help="of these, how many the judge is checked on")
    parser.add_argument("--value-steps", type=int, default=800, help="optimizer steps of each value model")
    parser.add_argument("--steps", type=int, default=8000, help="optimizer steps of each policy")
    parser.add_argument("--episodes", type=int, default=192, help="of each policy's evaluation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11], help="of RECAP's policies")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time, each of one thread")
    options = vars(parser.parse_args())
    jobs = options.pop("jobs")
    bench = Bench(options.pop("output").resolve(), **options)
    (bench.folder / "evaluations").mkdir(parents=True, exist_ok=True)
    collect(bench)
    judge(bench)
    with ThreadPoolExecutor(jobs) as pool:
        chains = [pool.submit(chain, bench, arm) for chain in (recap, filtered) for arm in ARMS]
        for chain in [*chains, pool.submit(imitate, bench)]:
            chain.result()
    print(section(bench.folder))


if __name__ == "__main__":
    main()

"""One policy fit in two processes of torchrun: who writes, that each has its part, and that it resumes exactly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrasp.core.errors import ConfigError
from regrasp.learn.processes import launched
from regrasp.learn.sampler import MixtureSampler
from regrasp.recap.fit_folder import claimed
from regrasp.recap.policy_fit import PolicyFitConfig, run
from tests.datasets import EpisodeSpec, write_dataset

TWO = {"RANK": "1", "WORLD_SIZE": "2"}


def test_the_parts_of_two_processes_make_one_batch():
    whole = MixtureSampler([50, 30], [1.0, 2.0], batch_size=8, seed=3)
    parts = [MixtureSampler([50, 30], [1.0, 2.0], batch_size=8, seed=3, process=n, processes=2) for n in (0, 1)]
    for _ in range(3):
        one, other = (next(part) for part in parts)
        assert sorted(one + other) == sorted(next(whole))
        assert len(one) == len(other) == 4


def test_a_batch_that_cannot_be_shared_and_a_fit_of_one_process_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    assert (launched().number, launched().count, launched().first) == (1, 2, False)
    with pytest.raises(ConfigError, match="--batch-size 7 cannot be shared evenly among 2 processes"):
        run(PolicyFitConfig(output=tmp_path / "p", batch_size=7))
    refused = pytest.raises(ConfigError, match=r"A value fit runs in one process\. Mend: start it without torchrun")
    with refused, claimed(tmp_path / "v", {}, what="value fit", resume=False, overwrite=False):
        pass
    assert not list(tmp_path.iterdir())


def torchrun(*words: object, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "regrasp"] if script is None else [str(script)]
    quiet = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, words)], capture_output=True, text=True, check=False, env=quiet, timeout=300
    )


KILLED = """
import os, signal, sys
from regrasp.cli.main import main
from regrasp.recap import policy_fit
policy_fit.count_steps = lambda steps: lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 6 else None
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_train_one_policy_that_the_first_writes_and_that_resumes_exactly(tmp_path: Path):
    data = write_dataset(tmp_path / "data", episodes=[EpisodeSpec(9)] * 5, camera_kind="none")
    fit = ["policy", "fit", "--rollouts", data, "--steps", 8, "--batch-size", 8, "--device", "cpu", "--holdout", 0.2]
    fit += ["--checkpoint-every", 4, "--hidden-dim", 16]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    done = torchrun(*fit, "--output", undisturbed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"Wrote {undisturbed}") == 1
    last = undisturbed / "training" / "states" / "step_00000008"
    assert len(list(last.glob("random_states_*"))) == 2

    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    assert torchrun(*fit, "--output", killed, script=script).returncode != 0
    assert not (killed / "model.safetensors").exists()
    done = torchrun(*fit, "--output", killed, "--resume")
    assert done.returncode == 0, done.stderr
    assert "resumed from step 4" in done.stdout
    assert (killed / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert (killed / "training" / "metrics.jsonl").read_text() == (
        undisturbed / "training" / "metrics.jsonl"
    ).read_text()
    with pytest.raises(ConfigError, match="processes was 2 and is now None"):
        run(
            PolicyFitConfig(
                rollouts=(data,),
                output=killed,
                steps=8,
                batch_size=8,
                device="cpu",
                holdout=0.2,
                checkpoint_every=4,
                hidden_dim=16,
                resume=True,
            )
        )

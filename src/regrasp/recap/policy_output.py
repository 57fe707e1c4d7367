"""What a policy fit leaves behind: a LeRobot checkpoint, where it came from, and what is said of it."""

import hashlib
import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrasp.core.errors import listing
from regrasp.core.provenance import VERSION, digest
from regrasp.data.dataset import Dataset
from regrasp.data.storage import Transaction
from regrasp.recap.fit_folder import deciding
from regrasp.recap.policy_episodes import PolicyEpisodes

if TYPE_CHECKING:
    from regrasp.recap.policy_fit import PolicyFitConfig, Prepared

RECORD = "regrasp.json"
_GROUPS = ("positive", "negative", "demo", "rollout")


def fit_settings(config: "PolicyFitConfig", found: PolicyEpisodes, cameras: tuple[str, ...]) -> dict[str, Any]:
    """Everything that decides a fit, as JSON."""
    used: dict[str, list[int]] = {dataset.name: [] for dataset in found.datasets}
    for episode in found.episodes:
        used[found.datasets[episode.dataset].name].append(episode.episode_index)
    return deciding(config, apart={"threads"}) | {
        "cameras": list(cameras),
        "datasets": {
            d.name: {"fingerprint": d.index().fingerprint, "weight": d.weight, "episodes": digest(used[d.name])}
            for d in found.datasets
        },
        "labels_ids": None if found.labels is None else [sidecar.id for sidecar in found.labels],
    }


def trained_on(config: "PolicyFitConfig", found: PolicyEpisodes) -> str:
    """What a policy was trained on, in a few words for a table."""
    how = ""
    if config.conditioned:
        how = f", conditioned on {config.labels}"
    elif config.weighting == "advantage":
        how = f", weighted by the advantages of {config.labels}"
    which = "successes: " if config.episodes == "success" else ""
    return which + listing(found.counts()) + how


def save_policy(
    config: "PolicyFitConfig", prepared: "Prepared", settings: dict[str, Any], held_out: dict[str, float]
) -> list[Path]:
    """Publish the checkpoint: LeRobot's files and ``regrasp.json`` appear together."""
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        prepared.policy.save_pretrained(made)
        for processor in prepared.processors:
            processor.save_pretrained(made)
        files = {path.name: path.read_bytes() for path in sorted(made.iterdir()) if path.is_file()}
    found = prepared.found
    record = {
        "stage": "policy fit",
        "version": VERSION,
        "id": digest(settings),
        "config": settings,
        "trained_on": trained_on(config, found),
        "datasets": [
            {
                "name": dataset.name,
                "source": dataset.source.value,
                "fingerprint": dataset.index().fingerprint,
                "weight": dataset.weight,
                "labels": None if found.labels is None else {"tag": config.labels, "id": found.labels[place].id},
                "episodes": sum(e.dataset == place for e in found.episodes),
                "held_out_episodes": [e.episode_index for e in found.part(held_out=True) if e.dataset == place],
            }
            for place, dataset in enumerate(found.datasets)
        ],
        "held_out": {name: value if math.isfinite(value) else None for name, value in held_out.items()},
        "sha256": hashlib.sha256(files["model.safetensors"]).hexdigest(),
    }
    files[RECORD] = (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()
    with Transaction() as transaction:
        for name, content in files.items():
            transaction.create(config.output / name).write(content)
        return transaction.commit()


def report_lines(
    config: "PolicyFitConfig",
    found: PolicyEpisodes,
    inputs: Iterable[str],
    held_out: dict[str, float],
    resumed_from: int | None,
) -> list[str]:
    """Say what was learnt from what, and the held-out loss by label."""
    training, held = (found.part(held_out=which) for which in (False, True))
    resumed = f", resumed from step {resumed_from}" if resumed_from else ""
    lines = [
        f"Trained on {trained_on(config, found)}",
        f"Episodes: {len(training)} for training ({sum(e.length for e in training)} frames), {len(held)} held out; "
        f"inputs: {listing(inputs)}; {config.steps} steps{resumed}",
    ]
    if held:
        by = [f"{n} {held_out[f'loss_{n}']:.4f}" for n in _GROUPS if f"loss_{n}" in held_out]
        lines.append(f"Held-out loss: {held_out['loss']:.4f} ({listing(by)})")
    return lines


def next_steps(config: "PolicyFitConfig", datasets: list[Dataset]) -> str:
    """The command that a person would run next."""
    environments = [environment for dataset in datasets if (environment := recorded_environment(dataset))]
    return f"regrasp evaluate {config.output} --env {environments[0] if environments else 'ENVIRONMENT'}"


def recorded_environment(dataset: Dataset) -> str | None:
    """The environment that a dataset was recorded in by Regrasp, or None where it does not say."""
    path = dataset.path / "meta" / "recording.json"
    if not path.is_file():
        return None
    return json.loads(path.read_text()).get("environment", {}).get("name")

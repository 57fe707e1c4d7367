"""A LeRobot checkpoint as a policy for rollouts: any type that this installation can load."""

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regrasp.models.flow_policy  # noqa: F401 - registers the reference policy with LeRobot
from regrasp.collect.environment import CameraSpec, EnvironmentSpec, Observation, camera_name
from regrasp.core.errors import CheckpointError, ConfigError, RegraspError, listing, nearest, one_line
from regrasp.models.flow_policy import FlowPolicy

_STREAM = 0x464C4F57  # keeps the sampling noise apart from whatever else is drawn from an episode's seed


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How actions are sampled, where it is to differ from what the checkpoint says."""

    noise_scale: float | None = None
    """Standard deviation of the starting noise."""
    guidance_scale: float | None = None
    """Beta of classifier-free guidance."""
    condition: str | None = None
    """What the policy is asked for: positive, negative or none."""


def checkpoint_fingerprint(path: Path) -> str:
    """Return a digest of a checkpoint's weights, settings and processors.

    Raises:
        CheckpointError: there is no checkpoint at ``path``.
    """
    files = sorted(file for pattern in ("config.json", "model*.safetensors", "policy_*") for file in path.glob(pattern))
    if path / "config.json" not in files or not any(file.suffix == ".safetensors" for file in files):
        found = listing(sorted(file.name for file in path.iterdir())) if path.is_dir() else "no such folder"
        raise CheckpointError(
            f"'{path}' is not a policy checkpoint: config.json and model.safetensors are needed; found "
            f"{found or 'an empty folder'}. Give the folder that holds them, such as "
            f"RUN/checkpoints/last/pretrained_model."
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def checkpoint_cameras(path: Path) -> tuple[CameraSpec, ...]:
    """Return the cameras that a checkpoint's policy looks through, as its config names and sizes them."""
    checkpoint_fingerprint(path)
    features: dict[str, dict[str, Any]] = _read_config(path).get("input_features") or {}
    return tuple(
        CameraSpec(name=camera_name(key), height=feature["shape"][1], width=feature["shape"][2])
        for key, feature in features.items()
        if feature.get("type") == "VISUAL"
    )


class CheckpointPolicy:
    """A policy from a checkpoint with its processors; a ``RolloutPolicy``.

    A ``FlowPolicy`` draws each episode's noise from the episode's seed. Other types draw from torch's generator,
    which is seeded at the start of each group.
    """

    def __init__(
        self, path: Path, spec: EnvironmentSpec, *, sampling: Sampling | None = None, device: str = "cpu"
    ) -> None:
        """Load the checkpoint at ``path`` for the environment.

        Args:
            path: a folder in LeRobot's layout.
            spec: of the environment that the policy is to act in.
            sampling: settings to sample with instead of the checkpoint's.
            device: torch's name of it.

        Raises:
            CheckpointError: it cannot be loaded.
            ConfigError: its sizes or its settings do not fit.
        """
        checkpoint_fingerprint(path)
        _check_type(path)
        from lerobot.configs import PreTrainedConfig
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors

        try:
            config: Any = PreTrainedConfig.from_pretrained(path)
            config.device = device
            _apply(config, sampling or Sampling(), path)
            with redirect_stdout(sys.stderr):  # LeRobot prints what it loads
                self._policy: Any = get_policy_class(config.type).from_pretrained(path, config=config).eval()
            overrides = {"device_processor": {"device": device}}
            self._before, self._after = make_pre_post_processors(
                config, pretrained_path=str(path), preprocessor_overrides=overrides
            )
        except RegraspError:
            raise
        except Exception as error:  # each policy and each of LeRobot's parsers has its own kinds
            raise CheckpointError(
                f"The policy '{path}' cannot be loaded ({type(error).__name__}: {one_line(error, 400)}). Mend: use "
                "the versions of LeRobot and of the policy's package that wrote it."
            ) from error
        _check_sizes(config, spec, path)
        if device == "cpu" and not spec.cameras:
            torch.set_num_threads(1)  # a small network gains nothing from more, and loses much beside busy workers
        self._spec, self._steps = spec, int(getattr(config, "n_action_steps", 1))
        self._inputs = set(config.input_features)
        self._generators: list[torch.Generator] = []

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin a group of episodes, whose sampling follows from their seeds."""
        self._policy.reset()
        self._generators = [torch.Generator().manual_seed(_stream(seed)) for seed in seeds]
        if seeds:
            torch.manual_seed(_stream(seeds[0]))

    @torch.inference_mode()
    def act(self, observations: Observation) -> np.ndarray:
        """Return the next actions of each episode, float32 [B, N, A]; see ``RolloutPolicy``."""
        batch: dict[str, Any] = {}
        for key in sorted(self._inputs & observations.keys()):
            seen = torch.from_numpy(observations[key])
            batch[key] = seen if seen.ndim == 2 else seen.permute(0, 3, 1, 2).contiguous().float() / 255.0
        batch["task"] = [self._spec.task] * len(next(iter(observations.values())))
        batch = self._before(batch)
        if isinstance(self._policy, FlowPolicy):
            chunk = self._policy.predict_action_chunk(batch, generator=self._generators)[:, : self._steps]
        else:
            chunk = self._policy.select_action(batch)[:, None]
        return self._after(chunk).float().cpu().numpy()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise CheckpointError(
            f"'{path / 'config.json'}' is not JSON ({error}), so there is no policy in it."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path / 'config.json'}' is not the config of a policy; it holds {content!r:.60}.")
    return content


def _check_type(path: Path) -> None:
    """Refuse a type of policy that this installation does not have."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.utils.import_utils import register_third_party_plugins

    register_third_party_plugins()
    kind = _read_config(path).get("type")
    known = sorted(PreTrainedConfig.get_known_choices())
    if kind not in known:
        raise CheckpointError(
            f"The policy '{path}' is of type {kind!r}, which is not installed here.{nearest(str(kind), known)} There "
            f"are: {listing(known, 40)}. Mend: install the package that has it, whose name begins with lerobot_policy_."
        )


def _stream(seed: int) -> int:
    return int(np.random.SeedSequence([_STREAM, seed]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _apply(config: Any, sampling: Sampling, path: Path) -> None:  # noqa: ANN401 - each type has its own config
    for name in ("noise_scale", "guidance_scale", "condition"):
        value = getattr(sampling, name)
        if value is None:
            continue
        if not hasattr(config, name):
            raise ConfigError(
                f"The policy '{path}' is of type {config.type!r}, which has no setting {name!r}. Leave "
                f"--{name.replace('_', '-')} out, or use a policy that has it, such as regrasp_flow."
            )
        setattr(config, name, value)
    config.__post_init__()


def _check_sizes(config: Any, spec: EnvironmentSpec, path: Path) -> None:  # noqa: ANN401
    found = {key: tuple(feature.shape) for key, feature in {**config.input_features, **config.output_features}.items()}
    given: dict[str, tuple[int, ...]] = {key: (size,) for key, size in spec.vector_sizes.items()}
    given["action"] = (spec.action_size,)
    given.update({camera.key: (3, camera.height, camera.width) for camera in spec.cameras})
    wrong = [key for key in given if key in found and found[key] != given[key]]
    missing = [key for key in found if key.startswith("observation.") and key not in given and "advantage" not in key]
    if wrong:
        sizes = listing(f"{key} {list(found[key])} against {list(given[key])}" for key in wrong)
        raise ConfigError(
            f"The policy '{path}' and {spec.name} differ in size: {sizes}. Use an environment like the one that the "
            f"policy was trained for, or train one for this."
        )
    if missing:
        gives = listing(key for key in given if key != "action")
        raise ConfigError(
            f"The policy '{path}' needs {listing(missing)}, which {spec.name} does not give; it gives {gives}."
        )

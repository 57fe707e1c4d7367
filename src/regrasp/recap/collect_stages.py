"""Experience: demonstrations of scripted experts, rollouts of a policy, and evaluation."""

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from regrasp.collect.collection import collect, episode_seeds, first_of_each
from regrasp.collect.environment import CameraSpec, Environment, EnvironmentSpec
from regrasp.collect.environments import DEFAULT_COPIES, describe_environment, start_environment
from regrasp.collect.evaluate import Evaluation, compare_all, comparison_table, evaluate_policy, results_table
from regrasp.collect.experts import ExpertPolicy, find_mix
from regrasp.collect.recording import Recording, RecordingHeader
from regrasp.collect.rollout import EpisodeRecord, RolloutPolicy
from regrasp.core.errors import ConfigError, DatasetError
from regrasp.data.storage import write_json_atomic
from regrasp.recap.selection import StageResult
from regrasp.report.progress import track

EXPERT = "expert:"
_MOST_ATTEMPTS = 20


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How episodes are run; the base of the three commands' settings."""

    seed: int = 0
    """The run's seed, from which every episode's own follows."""
    max_episode_steps: int | None = None
    """Cut episodes off after this many steps; the environment's own limit if not given."""
    copies: int = DEFAULT_COPIES
    """Episodes that run together."""
    workers: int | None = None
    """Processes for the environment; one per core if not given, 0 for none beside this one."""
    config: Path | None = None
    """A recipe.yaml with settings for this command; flags go before it."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class SampleSettings(RunSettings):
    """How a policy samples its actions."""

    noise_scale: float | None = None
    """Standard deviation of the starting noise; the checkpoint's own if not given."""
    guidance_scale: float | None = None
    """Beta of classifier-free guidance; the checkpoint's own if not given."""
    condition: Literal["positive", "negative", "none"] | None = None
    """What the policy is asked for; the checkpoint's own if not given."""
    device: str = "cpu"
    """Where the policy runs, in torch's words."""


@dataclass(frozen=True, kw_only=True)
class DemosConfig(RunSettings):
    """Record demonstrations of scripted experts."""

    env: Annotated[str, tyro.conf.Positional]
    """The environment, such as metaworld:pick-place-v3."""
    record: Path
    """The dataset's folder. It must not exist."""
    episodes: int = 40
    """Demonstrations to record."""
    mix: str = "slow"
    """The experts' quality: clean, shaky, offset, slow, hesitant or biased."""
    keep: Literal["successes", "all"] = "successes"
    """Which attempts become demonstrations. Every demonstration counts as a success later, a failed one too."""
    cameras: tuple[str, ...] = ()
    """Cameras to record besides the state."""
    image_size: int | None = None
    """Height and width of their images, in pixels; 96 if not given."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(SampleSettings):
    """Record a policy's own episodes."""

    policy: Annotated[str, tyro.conf.Positional]
    """A checkpoint's folder, or expert:MIX."""
    env: str
    """The environment, such as metaworld:pick-place-v3, pusht or lerobot:aloha."""
    record: Path
    """The dataset's folder. It must not exist, or hold this very recording."""
    episodes: int = 300
    """Episodes to record."""
    cameras: tuple[str, ...] = ()
    """Cameras to record besides those that the policy looks through."""
    image_size: int | None = None
    """Height and width of their images, in pixels; 96 if not given. LeRobot's environments have sizes of their own."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SampleSettings):
    """Measure policies on the same initial states."""

    policies: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Checkpoints' folders, or expert:MIX. The first is the baseline of the comparisons."""
    env: tuple[str, ...]
    """The environments, such as metaworld:pick-place-v3, pusht or lerobot:aloha."""
    episodes: int = 200
    """Episodes of each policy in each environment."""
    out: Path | None = None
    """Also write the results, episode by episode, to this JSON file."""
    video: Path | None = None
    """Write videos of the first successes and failures into this folder."""
    videos: int = 3
    """How many of each."""


def run(config: DemosConfig | RolloutConfig | EvaluateConfig) -> StageResult:
    """Run one of the three commands.

    Raises:
        ConfigError: unknown environment, mix or policy; sizes that do not fit; a path that is taken.
        CheckpointError: a policy cannot be loaded.
        DatasetError: no attempt of the experts succeeded.
    """
    if isinstance(config, DemosConfig):
        return record_demos(config)
    return record_rollouts(config) if isinstance(config, RolloutConfig) else evaluate(config)


def record_demos(config: DemosConfig) -> StageResult:
    """Record demonstrations until there are as many as asked for."""
    spec = describe_environment(
        config.env, max_episode_steps=config.max_episode_steps, cameras=_recorded_cameras(config)
    )
    mix = find_mix(config.mix)
    policy = ExpertPolicy(spec, mix)
    header = RecordingHeader(
        environment=spec,
        source="demo",
        policy=EXPERT + config.mix,
        policy_fingerprint=_digest(asdict(mix)),
        settings={"seed": config.seed, "episodes": config.episodes, "keep": config.keep},
    )
    recording = Recording(config.record, header)
    if recording.complete:
        return _already(recording)
    only_successes = config.keep == "successes"
    attempts = config.episodes * (_MOST_ATTEMPTS if only_successes else 1)
    outcomes = collect(
        recording,
        lambda: (_start(spec, config), policy),
        episode_seeds(config.seed, attempts, "demo"),
        group=config.copies,
        successes=config.episodes if only_successes else None,
    )
    won = list(track(outcomes, description=f"Demonstrations of {spec.name}", unit="episodes"))
    chosen = [number for number, success in enumerate(won) if success or not only_successes][: config.episodes]
    if len(chosen) < config.episodes:
        raise DatasetError(
            f"{sum(won)} of {len(won)} attempts of the experts {config.mix!r} succeeded in {spec.name} within "
            f"{spec.max_episode_steps} steps, and {config.episodes} demonstrations were asked for. Give them more "
            f"steps with --max-episode-steps, choose a better --mix, or keep failures too with --keep all."
        )
    path = recording.publish(chosen)
    tried = chosen[-1] + 1
    lines = [
        f"{len(chosen)} demonstrations of {spec.name} in '{path}'; {sum(won[:tried])} of {tried} attempts succeeded."
    ]
    return StageResult(lines=lines, written=[path])


def record_rollouts(config: RolloutConfig) -> StageResult:
    """Record a policy's episodes, with outcomes."""
    seen = _cameras(config.policy)
    cameras = seen + tuple(
        camera for camera in _recorded_cameras(config) if camera.key not in {one.key for one in seen}
    )
    spec = describe_environment(config.env, max_episode_steps=config.max_episode_steps, cameras=cameras)
    sampling = {name: getattr(config, name) for name in ("noise_scale", "guidance_scale", "condition")}
    header = RecordingHeader(
        environment=spec,
        source="rollout",
        policy=config.policy,
        policy_fingerprint=_fingerprint(config.policy),
        settings={"seed": config.seed, "episodes": config.episodes, "copies": config.copies, **sampling},
    )
    recording = Recording(config.record, header)
    if recording.complete:
        return _already(recording)
    policy = load_policy(config.policy, spec, config)
    outcomes = collect(
        recording,
        lambda: (_start(spec, config), policy),
        episode_seeds(config.seed, config.episodes, "rollout"),
        group=config.copies,
    )
    won = list(track(outcomes, total=config.episodes, description=f"Rollouts in {spec.name}", unit="episodes"))
    path = recording.publish()
    lines = [f"{len(won)} rollouts in '{path}'; {sum(won)} succeeded.", *_one_sided(won)]
    lines.append(f"Next: regrasp returns --rollouts {shlex.quote(str(path))} --tag NAME")
    return StageResult(lines=lines, written=[path])


def evaluate(config: EvaluateConfig) -> StageResult:
    """Measure every policy in every environment, and compare each with the first."""
    if not config.policies or not config.env:
        raise ConfigError(
            "An evaluation needs at least one policy, a checkpoint's folder or expert:MIX, and one --env."
        )
    if len(set(config.policies)) < len(config.policies):
        raise ConfigError(f"A policy was named twice: {', '.join(config.policies)}.")
    results = [_evaluate_one(name, env, config) for env in config.env for name in config.policies]
    lines = [results_table(results)]
    if len(config.policies) > 1:
        comparisons = compare_all(results, config.policies[0])
        lines += ["", "On the same initial states:", "", comparison_table(comparisons)]
    written = []
    if config.out is not None:
        write_json_atomic(config.out, [result.to_json() for result in results])
        written.append(config.out)
        lines += ["", f"Episode by episode in '{config.out}'."]
    if config.video is not None:
        written.append(config.video)
        lines += ["", f"Videos in '{config.video}'."]
    return StageResult(lines=lines, written=written)


def _evaluate_one(name: str, env: str, config: EvaluateConfig) -> Evaluation:
    spec = describe_environment(env, max_episode_steps=config.max_episode_steps, cameras=_cameras(name))
    policy = load_policy(name, spec, config)
    seeds = episode_seeds(config.seed, config.episodes, "evaluate")
    choose = first_of_each(config.videos if config.video is not None else 0)
    chosen: dict[str, EpisodeRecord] = {}
    shown = iter(track(range(len(seeds)), description=f"{name} in {env}", unit="episodes"))

    def watch(episode: EpisodeRecord) -> None:
        next(shown)
        label = choose(episode)
        if label is not None:
            chosen[label] = replace(episode, observations={})

    environment = _start(spec, config)
    try:
        result = evaluate_policy(name, policy, environment, seeds, watch=watch)
        next(shown, None)
    finally:
        environment.close()
    if config.video is not None:
        _write_videos(config.video / _file_name(f"{name}-{env}"), spec, chosen)
    return result


def _write_videos(folder: Path, spec: EnvironmentSpec, chosen: dict[str, EpisodeRecord]) -> None:
    from regrasp.collect.replay import Replayer

    replayer = Replayer(replace(spec, cameras=()))
    try:
        for label, episode in chosen.items():
            replayer.write(episode, folder / f"{label}.mp4")
    finally:
        replayer.close()


def load_policy(name: str, spec: EnvironmentSpec, settings: SampleSettings) -> RolloutPolicy:
    """Return the policy that a checkpoint's folder or ``expert:MIX`` names.

    Args:
        name: as the user wrote it.
        spec: of the environment it is to act in.
        settings: how it samples.

    Raises:
        ConfigError: no such mix, or sizes and settings that do not fit.
        CheckpointError: the checkpoint cannot be loaded.
    """
    if name.startswith(EXPERT):
        return ExpertPolicy(spec, find_mix(name.removeprefix(EXPERT)))
    from regrasp.collect.checkpoint_policy import CheckpointPolicy, Sampling

    sampling = Sampling(
        noise_scale=settings.noise_scale, guidance_scale=settings.guidance_scale, condition=settings.condition
    )
    return CheckpointPolicy(Path(name), spec, sampling=sampling, device=settings.device)


def _recorded_cameras(config: DemosConfig | RolloutConfig) -> tuple[CameraSpec, ...]:
    """The cameras that are recorded because the user wants them."""
    size = config.image_size
    if size is not None and (size < 1 or not config.cameras or config.env.startswith("lerobot:")):
        raise ConfigError(
            f"--image-size {size} is the size, at least 1, of the --cameras that Regrasp draws; found cameras "
            f"{', '.join(config.cameras) or 'none'} of {config.env}. Mend: name cameras; those of a LeRobot "
            f"environment have the size that its own settings give them."
        )
    return tuple(CameraSpec(name=name, height=size or 96, width=size or 96) for name in config.cameras)


def _cameras(policy: str) -> tuple[CameraSpec, ...]:
    if policy.startswith(EXPERT):
        return ()
    from regrasp.collect.checkpoint_policy import checkpoint_cameras

    return checkpoint_cameras(Path(policy))


def _fingerprint(policy: str) -> str:
    if policy.startswith(EXPERT):
        return _digest(asdict(find_mix(policy.removeprefix(EXPERT))))
    from regrasp.collect.checkpoint_policy import checkpoint_fingerprint

    return checkpoint_fingerprint(Path(policy))


def _start(spec: EnvironmentSpec, config: RunSettings) -> Environment:
    return start_environment(spec, copies=config.copies, workers=config.workers)


def _already(recording: Recording) -> StageResult:
    return StageResult(lines=[f"'{recording.path}' holds this recording already."], written=[])


def _one_sided(won: Iterable[bool]) -> list[str]:
    """Say it when the outcomes carry no signal."""
    kinds = set(won)
    if kinds == {True}:
        return ["Every rollout succeeded: labels from these alone tell fast from slow, not success from failure."]
    if kinds == {False}:
        return ["Every rollout failed: their outcomes give labels no signal. Add demonstrations or a better policy's."]
    return []


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-")

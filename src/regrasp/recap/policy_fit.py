"""Stage 4: train a policy on demonstrations and rollouts, conditioned on how good each frame's actions were."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regrasp.core.errors import ConfigError
from regrasp.data.dataset import STATE
from regrasp.learn.processes import first_before_others, launched
from regrasp.learn.trackers import check_tracker
from regrasp.recap.fit_folder import TRAINING, claimed
from regrasp.recap.policy_episodes import PolicyEpisodes, find_policy_episodes, held_out_groups, read_labels
from regrasp.recap.policy_output import fit_settings, next_steps, report_lines, save_policy
from regrasp.recap.selection import Selection, StageResult, open_datasets
from regrasp.recap.value_data import choose_cameras, open_states
from regrasp.report.progress import count_steps
from regrasp.rl.condition import Negatives

if TYPE_CHECKING:
    from regrasp.learn.loop import TrainResult
    from regrasp.learn.policy_data import PolicyFrames
    from regrasp.learn.policy_objective import PolicyObjective


@dataclass(frozen=True, kw_only=True)
class PolicyFitConfig(Selection):
    """Train a flow policy; with --labels, conditioned on advantages (RECAP), else by plain imitation."""

    output: Path
    """The folder of the LeRobot checkpoint, with regrasp.json, and training/ for --resume."""
    labels: str | None = None
    """The tag of the advantages that condition the policy; none for plain imitation."""
    negatives: Negatives = "labelled"
    """What frames labelled negative are trained as: negative (the paper), or unconditional (RLinf)."""
    condition_dropout: float = 0.3
    """The share of samples whose condition is left out, so that guidance has a policy without it."""
    episodes: Literal["all", "success"] = "all"
    """Which episodes are imitated; success is filtered behaviour cloning."""
    tasks: tuple[str, ...] | None = None
    """Which tasks' episodes, by their texts. A flow policy reads no text: without this the data must be of one task."""
    weighting: Literal["none", "advantage"] = "none"
    """Advantage weighs each frame by exp(A / (temperature x std of A)) in place of a condition (AWR)."""
    temperature: float = 1.0
    """Of --weighting advantage, in standard deviations of the advantage."""
    weight_limit: float = 20.0
    """The greatest weight of --weighting advantage, before weights are divided by their mean."""
    cameras: tuple[str, ...] = ()
    """The cameras that the policy sees; all where it is left out, none for `none`."""
    state: bool = True
    """Whether the policy sees the robot's state."""
    image_size: int | None = None
    """The height and width that images are resized to; the cameras' own where it is left out."""
    chunk_size: int = 16
    """H: actions predicted at once."""
    action_steps: int = 8
    """Actions of a chunk that are carried out before the next is predicted."""
    hidden_dim: int = 128
    """Width of the velocity network."""
    hidden_layers: int = 2
    """Its hidden layers."""
    inference_steps: int = 10
    """Euler steps from noise to action."""
    guidance_scale: float = 1.0
    """beta, as the checkpoint has it; can be changed where it is run."""
    noise_scale: float = 1.0
    """Scale of the starting noise, as the checkpoint has it; can be changed where it is run."""
    steps: int = 8000
    """Optimizer steps; the weights after the last one are kept. Too few hurt most what learns from all of the data."""
    batch_size: int = 256
    """Frames in a step."""
    learning_rate: float = 3e-3
    """The peak, after a warm-up of a twentieth of the steps; it then falls to 0 along a cosine."""
    weight_decay: float = 1e-4
    """AdamW's."""
    ema_decay: float | None = 0.995
    """Keep an exponential moving average of the weights with this decay; None for the weights themselves."""
    holdout: float = 0.1
    """The share of episodes kept from training, by dataset, task and outcome; 0 for none."""
    checkpoint_every: int = 1000
    """Steps between checkpoints, each with an evaluation on the held-out episodes."""
    seed: int = 0
    """Decides the held-out episodes, the first weights and the order of frames."""
    tracker: str = "tensorboard"
    """Where metrics go beside metrics.jsonl: a tracker that accelerate knows (wandb, mlflow, trackio, ...), or none."""
    image_cache_gib: float = 2.0
    """The greatest size of the images kept on disk; above it they are read from the videos."""
    workers: int | None = None
    """Processes that decode; as many as there are cores, at most 8, where it is left out."""
    threads: int = 1
    """Threads that torch computes with; a small policy gains nothing from more."""
    device: Literal["auto", "cpu"] = "auto"
    """Train on the GPU where there is one, or on the CPU."""
    resume: bool = False
    """Go on from the last state in the output folder; start where there is none."""
    overwrite: bool = False
    """Replace what is in the output folder."""

    @property
    def conditioned(self) -> bool:
        """Whether the policy hears a condition."""
        return self.labels is not None and self.weighting == "none"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A policy with fresh weights, its processors, and its data."""

    found: PolicyEpisodes
    policy: Any
    processors: tuple[Any, Any]
    training: "PolicyFrames"
    objective: "PolicyObjective"


def run(config: PolicyFitConfig) -> StageResult:
    """Train and publish a policy checkpoint.

    Raises:
        ConfigError: A setting is out of range, the output folder holds something else, or the datasets do not join.
        MissingSidecar, SidecarError: The labels are missing, or do not fit the datasets.
        OutcomeError: Only successes are wanted and outcomes are unknown.
        DatasetError, VideoError: A dataset's actions, states or frames cannot be used.
    """
    _check(config)
    datasets = open_datasets(config, flags=True)
    found = find_policy_episodes(
        datasets,
        config.labels,
        only_successes=config.episodes == "success",
        holdout=config.holdout,
        seed=config.seed,
        tasks=config.tasks,
    )
    cameras = choose_cameras(config.cameras, datasets)
    settings = fit_settings(config, found, cameras)
    with _claim(config, settings) as training:
        from regrasp.learn.threads import torch_threads

        with first_before_others(cpu=config.device == "cpu"):
            prepared = _prepare(config, found, cameras, training)
        with torch_threads(config.threads):
            result = _train(config, prepared, training)
        if not launched().first:
            return StageResult(lines=[], written=[])
        held_out = prepared.objective.evaluate(prepared.policy)
        written = save_policy(config, prepared, settings, held_out)
    lines = report_lines(config, found, prepared.policy.config.input_features, held_out, result.resumed_from)
    lines += [f"Wrote {config.output}", f"Next: {next_steps(config, datasets)}"]
    return StageResult(lines=lines, written=written)


def _claim(config: PolicyFitConfig, settings: dict[str, Any]) -> AbstractContextManager[Path]:
    """Hold the output folder; where several processes train together, the first one holds it for all."""
    processes = launched()
    if not processes.first:
        return nullcontext(config.output / TRAINING)
    settings = settings | {"processes": processes.count if processes.count > 1 else None}
    return claimed(config.output, settings, what="policy fit", resume=config.resume, overwrite=config.overwrite)


def _check(config: PolicyFitConfig) -> None:
    for name in ("steps", "batch_size", "checkpoint_every", "chunk_size", "hidden_dim", "hidden_layers"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is at least 1; found {getattr(config, name)}.")
    if config.batch_size % launched().count:
        raise ConfigError(
            f"--batch-size {config.batch_size} cannot be shared evenly among {launched().count} processes. Mend: "
            "choose a multiple of their number."
        )
    if not 0 <= config.holdout < 1:
        raise ConfigError(f"--holdout is at least 0 and below 1; found {config.holdout}.")
    if config.weighting == "advantage" and config.labels is None:
        raise ConfigError("--weighting advantage needs advantages. Mend: name them with --labels TAG.")
    if not (config.temperature > 0 and config.weight_limit >= 1):
        raise ConfigError("--temperature is above 0, and --weight-limit at least 1.")
    if config.guidance_scale != 1 and not config.conditioned:
        raise ConfigError("--guidance-scale needs a conditioned policy. Mend: name its labels with --labels TAG.")
    if config.resume and config.overwrite:
        raise ConfigError("--resume goes on with what --overwrite would remove. Mend: give one of them.")
    check_tracker(config.tracker)


def _prepare(config: PolicyFitConfig, found: PolicyEpisodes, cameras: tuple[str, ...], folder: Path) -> Prepared:
    """Copy rows, decode images, read labels, and build the policy with fresh weights."""
    import torch

    from regrasp.learn.episode_rows import FrameTable
    from regrasp.learn.policy_data import PolicyFrames, action_rows
    from regrasp.learn.policy_objective import PolicyObjective
    from regrasp.models.flow_policy import FlowPolicy, make_regrasp_flow_pre_post_processors
    from regrasp.recap.policy_inputs import (
        check_sizes,
        dataset_statistics,
        fill_images,
        flow_config,
        on_training_device,
        open_environment_states,
        open_images,
    )

    places = [folder / "rows" / str(place) for place in range(len(found.datasets))]
    rows = open_states(found.datasets, places, [STATE] if config.state else [])
    actions = [action_rows(d, p) for d, p in zip(found.datasets, places, strict=True)]
    check_sizes(found.datasets, actions)
    environment = open_environment_states(found.datasets, places, wanted=config.state)
    images = open_images(config, found, rows, cameras, folder / "images")
    fill_images(config, found, images)
    weighting = (config.temperature, config.weight_limit) if config.weighting == "advantage" else None
    labels = read_labels(found, negatives=config.negatives, weighting=weighting)
    tables = [FrameTable(found.part(held_out=held), 1) for held in (False, True)]
    training, held_out = (
        PolicyFrames(t, rows, actions, labels, images, config.chunk_size, environment) for t in tables
    )
    flow = flow_config(config, training)
    torch.manual_seed(config.seed)
    policy = FlowPolicy(flow)
    statistics = dataset_statistics(found, training)
    processors = make_regrasp_flow_pre_post_processors(flow, statistics)
    preprocess, _ = make_regrasp_flow_pre_post_processors(on_training_device(flow, config.device), statistics)
    groups = held_out_groups(found, *tables[1].locate(np.arange(len(tables[1]))), labels) if len(tables[1]) else {}
    objective = PolicyObjective(preprocess, held_out, groups, batch_size=max(config.batch_size, 256), seed=config.seed)
    return Prepared(found=found, policy=policy, processors=processors, training=training, objective=objective)


def _train(config: PolicyFitConfig, prepared: Prepared, folder: Path) -> "TrainResult":
    """Train, and leave the weights after the last step in the policy."""
    import torch
    from safetensors.torch import load_file
    from torchdata.stateful_dataloader import StatefulDataLoader

    from regrasp.learn.loop import TrainConfig, train
    from regrasp.learn.sampler import MixtureSampler
    from regrasp.learn.training_state import StateStore
    from regrasp.recap.policy_inputs import batch_as_it_is

    datasets = prepared.found.datasets
    sampler = MixtureSampler(
        prepared.training.table.dataset_sizes(len(datasets)),
        [dataset.weight for dataset in datasets],
        batch_size=config.batch_size,
        seed=config.seed,
        process=launched().number,
        processes=launched().count,
    )
    generator = torch.Generator().manual_seed(config.seed)
    batches = StatefulDataLoader(
        prepared.training, batch_sampler=sampler, collate_fn=batch_as_it_is, generator=generator
    )
    training = TrainConfig(
        steps=config.steps,
        learning_rate=config.learning_rate,
        warmup_steps=config.steps // 20,
        weight_decay=config.weight_decay,
        ema_decay=config.ema_decay,
        checkpoint_every=config.checkpoint_every,
        log_every=int(np.gcd(config.checkpoint_every, 20)),
        seed=config.seed,
        tracker=config.tracker,
    )
    result = train(
        prepared.policy,
        prepared.objective,
        batches,
        training,
        folder,
        resume=config.resume,
        cpu=config.device == "cpu",
        on_step=count_steps(config.steps) if launched().first else lambda _: None,
    )
    prepared.policy.load_state_dict(load_file(StateStore(folder).weights(config.steps)))
    return result

"""The inputs of a policy fit: sizes, images, statistics, and the policy's own config. Imports torch and lerobot."""

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lerobot.configs import FeatureType, PolicyFeature

from regrasp.core.errors import ConfigError, listing
from regrasp.data.dataset import ENVIRONMENT_STATE, STATE, Dataset
from regrasp.learn.episode_pool import cores
from regrasp.learn.episode_rows import DatasetRows
from regrasp.learn.image_cache import Images
from regrasp.learn.policy_data import (
    ACTION,
    PolicyFrames,
    VectorRows,
    environment_rows,
    mixture_moments,
)
from regrasp.models.flow_policy import FlowConfig
from regrasp.recap.policy_episodes import PolicyEpisodes
from regrasp.recap.value_data import sees_objects
from regrasp.report.progress import track

if TYPE_CHECKING:
    from regrasp.recap.policy_fit import PolicyFitConfig

_PIXEL_SAMPLES = 512
"""Frames by which a camera's mean and standard deviation are estimated."""


def check_sizes(datasets: Sequence[Dataset], rows: Sequence[VectorRows], what: str = "actions") -> None:
    """Refuse datasets whose actions (or ``what``) do not have one size; a ConfigError names each."""
    sizes = [one.values.shape[1] for one in rows]
    if len(set(sizes)) > 1:
        found = listing(f"{dataset.name} {size}" for dataset, size in zip(datasets, sizes, strict=True))
        raise ConfigError(f"One policy needs {what} of one size; found {found}. Mend: train a policy for each robot.")


def open_environment_states(datasets: Sequence[Dataset], places: Sequence[Path], *, wanted: bool) -> list[VectorRows]:
    """What the simulators knew of their objects, where every dataset says it; what is left out is said.

    Raises:
        ConfigError: The datasets say it in vectors of different sizes.
    """
    if not sees_objects(datasets, wanted=wanted):
        return []
    rows = [environment_rows(dataset, place) for dataset, place in zip(datasets, places, strict=True)]
    check_sizes(datasets, rows, f"an {ENVIRONMENT_STATE}")
    return rows


def open_images(
    config: "PolicyFitConfig",
    found: PolicyEpisodes,
    rows: Sequence[DatasetRows],
    cameras: tuple[str, ...],
    folder: Any,  # noqa: ANN401
) -> Images:
    """The images of the run at the policy's size.

    Raises:
        ConfigError: A dataset lacks a camera, or their sizes differ and none was chosen.
    """
    for dataset in found.datasets:
        missing = [camera for camera in cameras if camera not in dataset.cameras]
        if missing:
            raise ConfigError(
                f"The policy sees {listing(cameras)}, and '{dataset.path}' has no {listing(missing)}. Mend: name the "
                "cameras that all datasets have with --cameras, or map them with `keys:` in the recipe."
            )
    sizes = {(d.cameras[c].height, d.cameras[c].width) for d in found.datasets for c in cameras}
    size = (config.image_size, config.image_size) if config.image_size else (sizes.pop() if len(sizes) == 1 else (1, 1))
    if cameras and (size == (1, 1) or None in size):
        raise ConfigError(
            f"The cameras differ in size ({listing(sorted(map(str, sizes)))}), or are not said. Mend: --image-size 96"
        )
    return Images(found.datasets, rows, cameras, (int(size[0] or 1), int(size[1] or 1)), folder)


def fill_images(config: "PolicyFitConfig", found: PolicyEpisodes, images: Images) -> None:
    """Decode every frame into the cache if all of them fit; else they are read from the videos."""
    frames = sum(episode.length for episode in found.episodes)
    size = frames * len(images.cameras) * images.size[0] * images.size[1] * 3
    if not images.cameras or size > config.image_cache_gib * 2**30:
        return

    def shown(work: Iterable[object], total: int) -> Iterable[object]:
        return track(work, total=total, description="Decoding", unit="episodes")

    images.fill(found.episodes, 1, cores(config.workers), shown)
    images.forget_others()


def flow_config(config: "PolicyFitConfig", frames: PolicyFrames) -> FlowConfig:
    """The policy's own config for the inputs and outputs that its frames have."""
    images, state_size = frames.images, frames.rows[0].states.shape[1]
    inputs = {STATE: PolicyFeature(FeatureType.STATE, (state_size,))} if state_size else {}
    if frames.environment:
        shape = (frames.environment[0].values.shape[1],)
        inputs[ENVIRONMENT_STATE] = PolicyFeature(FeatureType.ENV, shape)
    inputs |= {camera: PolicyFeature(FeatureType.VISUAL, (3, *images.size)) for camera in images.cameras}
    return FlowConfig(
        device="cpu",
        input_features=inputs,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (frames.actions[0].values.shape[1],))},
        chunk_size=config.chunk_size,
        n_action_steps=config.action_steps,
        hidden_dim=config.hidden_dim,
        hidden_layers=config.hidden_layers,
        conditioned=config.conditioned,
        condition_dropout=config.condition_dropout,
        guidance_scale=config.guidance_scale,
        noise_scale=config.noise_scale,
        num_inference_steps=config.inference_steps,
    )


def on_training_device(config: FlowConfig, wanted: str) -> FlowConfig:
    """The config with the device that accelerate trains on; the saved one says cpu, which every machine has."""
    accelerator = None if wanted == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    changed = copy.deepcopy(config)
    changed.device = "cpu" if accelerator is None else accelerator.type
    return changed


def dataset_statistics(found: PolicyEpisodes, training: PolicyFrames) -> dict[str, dict[str, torch.Tensor]]:
    """Mean and standard deviation of each feature over the training mixture, as LeRobot's normaliser takes them."""
    episodes = found.part(held_out=False)
    weights = [dataset.weight for dataset in found.datasets]
    parts: dict[str, Any] = {ACTION: [rows.values for rows in training.actions]}
    if training.rows[0].states.shape[1]:
        parts[STATE] = [rows.states for rows in training.rows]
    if training.environment:
        parts[ENVIRONMENT_STATE] = [rows.values for rows in training.environment]
    statistics = {}
    for key, values in parts.items():
        mean, deviation = mixture_moments(values, episodes, weights)
        statistics[key] = {"mean": torch.from_numpy(mean).float(), "std": torch.from_numpy(deviation).float()}
    if training.images.cameras:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(training), (min(_PIXEL_SAMPLES, len(training)),), generator=generator)
        inputs = training.__getitems__(drawn.tolist()).inputs
        for camera in training.images.cameras:
            deviation, mean = torch.std_mean(inputs[camera], dim=(0, 2, 3), keepdim=True)
            statistics[camera] = {"mean": mean[0], "std": deviation[0].clamp_min(1e-3)}
    return statistics


def batch_as_it_is(batch: Any) -> Any:  # noqa: ANN401 - a batch passes through as it was made
    """Return the batch."""
    return batch

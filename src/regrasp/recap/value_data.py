"""What a value model learns from: the episodes of a run, which of them are held out, and their targets."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from regrasp.core.errors import ConfigError, listing, nearest
from regrasp.core.scale import ScaleSet
from regrasp.data.dataset import ENVIRONMENT_STATE, STATE, Dataset
from regrasp.data.sidecar import Sidecar, open_sidecar
from regrasp.learn.holdout import stratified_holdout
from regrasp.recap.advantages import recorded_outcomes
from regrasp.recap.frames import check_source, common_discount, common_scales, kept_positions
from regrasp.recap.labelling import outcomes_of
from regrasp.recap.selection import tell

if TYPE_CHECKING:
    from regrasp.learn.episode_rows import DatasetRows, EpisodeRef, FrameTable
    from regrasp.learn.value_metrics import HeldOut

NO_CAMERAS = ("none",)
"""What ``--cameras`` says for a model of state and task alone."""


@dataclass(frozen=True, kw_only=True)
class FitEpisodes:
    """The episodes of a fit, dataset by dataset.

    Attributes:
        datasets: The run's datasets.
        returns: Their returns.
        scales: The scales of the returns.
        gamma: Their discount.
        episodes: Every episode that has returns.
        held_out: Which of them are kept from training.
    """

    datasets: list[Dataset]
    returns: list[Sidecar]
    scales: ScaleSet
    gamma: float
    episodes: "list[EpisodeRef]"
    held_out: Bool[np.ndarray, " E"]

    def part(self, held_out: bool) -> "list[EpisodeRef]":
        """Return the held-out episodes, or the training ones."""
        return [episode for episode, held in zip(self.episodes, self.held_out, strict=True) if bool(held) is held_out]


def find_episodes(datasets: list[Dataset], tag: str, holdout: float, seed: int) -> FitEpisodes:
    """Find every episode that has returns, and hold some out, by task and outcome.

    Args:
        datasets: The run's datasets.
        tag: The returns'.
        holdout: The share of episodes to hold out.
        seed: Which are drawn.

    Raises:
        MissingSidecar, SidecarError: The returns are missing, or not of one run.
        ConfigError: There are too few episodes.
    """
    from regrasp.learn.episode_rows import EpisodeRef

    returns = [open_sidecar(dataset, "returns", tag, reader="value fit") for dataset in datasets]
    pairs = list(zip(datasets, returns, strict=True))
    for dataset, sidecar in pairs:
        check_source(dataset, sidecar)
    scales, where = common_scales(pairs, None)
    if where != "the returns":
        tell(f"the return scale comes from {where}")
    episodes: list[EpisodeRef] = []
    for number, (dataset, sidecar) in enumerate(pairs):
        index = dataset.index()
        outcomes = outcomes_of(sidecar) or recorded_outcomes(dataset)
        offset = index.offset
        episodes += [
            EpisodeRef(
                dataset=number,
                episode_index=int(index.episode_index[position]),
                first_row=int(offset[position]),
                length=int(index.length[position]),
                task=index.task[position],
                width=float(scales.for_task(index.task[position]).width),
                success=outcomes.get(str(int(index.episode_index[position]))) == "success",
            )
            for position in kept_positions(dataset, sidecar.excluded).tolist()
        ]
    strata = [(episode.task, episode.success) for episode in episodes]
    return FitEpisodes(
        datasets=datasets,
        returns=returns,
        scales=scales,
        gamma=common_discount(pairs, None),
        episodes=episodes,
        held_out=stratified_holdout(strata, holdout, seed),
    )


def read_targets(found: FitEpisodes, training_stride: int, held_out_stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets of every kept frame of the training episodes, and of the held-out ones, float64 in [-1, 0].

    Raises:
        SidecarError: A return lies outside its task's scale.
    """
    from regrasp.learn.value_objective import unit_targets

    parts: dict[bool, list[np.ndarray]] = {False: [np.empty(0)], True: [np.empty(0)]}
    streams = {}
    for episode, held in zip(found.episodes, found.held_out.tolist(), strict=True):
        dataset, sidecar = found.datasets[episode.dataset], found.returns[episode.dataset]
        if episode.dataset not in streams:
            streams[episode.dataset] = sidecar.stream(["return"], kept_positions(dataset, sidecar.excluded))
        values = streams[episode.dataset].take(episode.length)["return"].astype(np.float32)
        where = f"episode {episode.episode_index} of {dataset.name!r} ('{sidecar.path}')"
        unit = unit_targets(values, found.scales.for_task(episode.task), episode.task, where)
        parts[held].append(unit[:: held_out_stride if held else training_stride])
    return np.concatenate(parts[False]), np.concatenate(parts[True])


def described(table: "FrameTable", targets: Float[np.ndarray, " n"]) -> "HeldOut":
    """Return what metrics and baselines need to know of the frames of a table."""
    from regrasp.learn.value_metrics import HeldOut

    episode, row = table.locate(np.arange(len(table)))
    return HeldOut(
        target=targets,
        width=np.array([e.width for e in table.episodes])[episode],
        episode=episode,
        elapsed=row,
        success=np.array([e.success for e in table.episodes], dtype=bool),
        task=np.array([zlib.crc32(e.task.encode()) for e in table.episodes], dtype=np.int64),
    )


def choose_cameras(wanted: tuple[str, ...], datasets: list[Dataset]) -> tuple[str, ...]:
    """Return the cameras of a run: those named, or all that any dataset has; what does not join is said.

    Raises:
        ConfigError: A named camera is in no dataset.
    """
    if wanted == NO_CAMERAS:
        return ()
    known = list(dict.fromkeys(camera for dataset in datasets for camera in dataset.cameras))
    unknown = [camera for camera in wanted if camera not in known]
    if unknown:
        raise ConfigError(
            f"No dataset of the run has a camera {unknown[0]!r}; they have: {listing(known) or 'none'}."
            f"{nearest(unknown[0], known)} Mend: name these, map them with `keys:` in the recipe, or --cameras none."
        )
    cameras = wanted or tuple(known)
    for dataset in datasets:
        missing = [camera for camera in cameras if camera not in dataset.cameras]
        if missing:
            tell(f"{dataset.name} has no camera {listing(map(repr, missing))}; the model sees it as missing there")
    return cameras


def choose_vectors(datasets: Sequence[Dataset], *, wanted: bool) -> tuple[str, ...]:
    """Return the vectors a model sees: the robot's state, and the simulator's of its objects where all have one."""
    found = (STATE,) if wanted and any(dataset.vector_columns([STATE]) for dataset in datasets) else ()
    return (*found, ENVIRONMENT_STATE) if sees_objects(datasets, wanted=wanted) else found


def sees_objects(datasets: Sequence[Dataset], *, wanted: bool) -> bool:
    """Whether every dataset says what its simulator knew of the objects; where only some do, that is told."""
    lacking = [dataset.name for dataset in datasets if not dataset.vector_columns([ENVIRONMENT_STATE])]
    if wanted and lacking and len(lacking) < len(datasets):
        tell(f"{listing(lacking)} have no {ENVIRONMENT_STATE}; the model does not see that of the other datasets")
    return wanted and not lacking


def open_states(datasets: Sequence[Dataset], places: Sequence[Path], vectors: Sequence[str]) -> "list[DatasetRows]":
    """Copy each dataset's timestamps and vectors to its place, or map the copies that are there.

    Raises:
        ConfigError: The vectors do not have one dimension in all; each is named.
        NonFiniteData: A number is NaN or infinite, with dataset, episode, frame and column.
    """
    from regrasp.learn.episode_rows import dataset_rows

    rows = [dataset_rows(d, place, d.vector_columns(vectors)) for d, place in zip(datasets, places, strict=True)]
    dimensions = [one.states.shape[1] for one in rows]
    if len(set(dimensions)) > 1:
        found = listing(
            f"{dataset.name} {dimension or 'none'} ({listing(dataset.vector_columns(vectors)) or 'no state column'})"
            for dataset, dimension in zip(datasets, dimensions, strict=True)
        )
        raise ConfigError(
            f"One model needs states of one dimension; found {found}. Mend: map columns of one meaning to "
            "observation.state with `keys:` in the recipe, fit a model for each robot, or use --no-state."
        )
    return rows


def episodes_by_dataset(found: FitEpisodes, held_out: bool) -> dict[str, list[int]]:
    """Return the numbers of the held-out or the training episodes of each dataset."""
    numbers: dict[str, list[int]] = {dataset.name: [] for dataset in found.datasets}
    for episode in found.part(held_out):
        numbers[found.datasets[episode.dataset].name].append(episode.episode_index)
    return numbers

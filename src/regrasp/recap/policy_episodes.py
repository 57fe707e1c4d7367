"""What a policy is trained on: the episodes of a run, which of them are held out, and the labels of their frames."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from regrasp.core.errors import ConfigError, OutcomeError, listing, nearest
from regrasp.core.outcome import Outcome, Source
from regrasp.data.dataset import Dataset
from regrasp.data.outcomes import read_outcomes
from regrasp.data.sidecar import Sidecar, open_sidecar
from regrasp.recap.frames import check_source, kept_positions
from regrasp.recap.labelling import outcomes_of
from regrasp.recap.selection import tell
from regrasp.rl.condition import Negatives, indicator

if TYPE_CHECKING:
    from regrasp.learn.episode_rows import EpisodeRef
    from regrasp.learn.policy_data import FrameLabels


@dataclass(frozen=True, kw_only=True)
class PolicyEpisodes:
    """The episodes of a fit, dataset by dataset.

    Attributes:
        datasets: The run's datasets.
        labels: Their advantages; None for a policy that is trained without.
        outcomes: Each dataset's outcomes, by episode.
        episodes: Every episode that is used.
        held_out: Which of them are kept from training.
    """

    datasets: list[Dataset]
    labels: list[Sidecar] | None
    outcomes: list[dict[int, Outcome]]
    episodes: "list[EpisodeRef]"
    held_out: Bool[np.ndarray, " E"]

    def part(self, held_out: bool) -> "list[EpisodeRef]":
        """Return the held-out episodes, or the training ones."""
        return [episode for episode, held in zip(self.episodes, self.held_out, strict=True) if bool(held) is held_out]

    def counts(self) -> list[str]:
        """What is trained on, dataset by dataset, in words."""
        used = [[e for e in self.episodes if e.dataset == place] for place in range(len(self.datasets))]
        return [
            f"{len(episodes)} of {len(dataset.index().length)} episodes of {dataset.name} ({dataset.source.value}s)"
            for dataset, episodes in zip(self.datasets, used, strict=True)
            if episodes
        ]


def find_policy_episodes(
    datasets: list[Dataset],
    tag: str | None,
    *,
    only_successes: bool,
    holdout: float,
    seed: int,
    tasks: tuple[str, ...] | None = None,
) -> PolicyEpisodes:
    """Find the episodes to train on, and hold some out, by dataset, task and outcome.

    Args:
        datasets: The run's datasets.
        tag: The labels'; None for none.
        only_successes: Leave out what is not known to be a success.
        holdout: The share of episodes to hold out; 0 for none.
        seed: Which are drawn.
        tasks: Whose episodes; where it is left out, the data must be of one task.

    Raises:
        MissingSidecar, SidecarError: The labels are missing, or do not fit the datasets.
        OutcomeError: Only successes are wanted and an outcome is unknown.
        ConfigError: No episode is left, there are too few to hold out any, or there are several tasks and none is
            named, since the flow policy reads no task text.
    """
    labels = None
    if tag is not None:
        labels = [open_sidecar(dataset, "advantages", tag, reader="policy fit") for dataset in datasets]
    episodes: list[EpisodeRef] = []
    outcomes: list[dict[int, Outcome]] = []
    for number, dataset in enumerate(datasets):
        sidecar = labels[number] if labels is not None else None
        outcomes.append(_outcomes(dataset, sidecar, needed=only_successes))
        offset = dataset.index().offset
        found = [
            _episode(number, dataset, position, int(offset[position]), outcomes[-1])
            for position in _kept(dataset, sidecar)
        ]
        episodes += found
    episodes = [e for e in _of_tasks(episodes, tasks) if e.success or not only_successes]
    if not episodes:
        raise ConfigError(
            f"None of the episodes of {listing(d.name for d in datasets)} is a success, so `--episodes success` leaves "
            "nothing to imitate. Mend: add demonstrations, or train on --episodes all."
        )
    held_out = _holdout(episodes, holdout, seed)
    return PolicyEpisodes(datasets=datasets, labels=labels, outcomes=outcomes, episodes=episodes, held_out=held_out)


def _of_tasks(episodes: "list[EpisodeRef]", wanted: tuple[str, ...] | None) -> "list[EpisodeRef]":
    """The episodes of the tasks that are wanted, or of the only one there is."""
    there = list(dict.fromkeys(episode.task for episode in episodes))
    if wanted is None and len(there) > 1:
        raise ConfigError(
            f"The flow policy reads no task text, so it cannot tell tasks apart, and the data have {len(there)}: "
            f"{listing(map(repr, there))}. Mend: name one, --tasks {there[0]!r}, and train a policy for each; or name "
            "several that are one task in other words, or whose observations tell them apart."
        )
    unknown = [task for task in wanted or () if task not in there]
    if unknown:
        raise ConfigError(
            f"No episode is of the task {unknown[0]!r}.{nearest(unknown[0], there)} The data have: "
            f"{listing(map(repr, there))}."
        )
    return [episode for episode in episodes if wanted is None or episode.task in wanted]


def _episode(
    number: int, dataset: Dataset, position: int, first_row: int, outcomes: dict[int, Outcome]
) -> "EpisodeRef":
    from regrasp.learn.episode_rows import EpisodeRef

    index = dataset.index()
    episode = int(index.episode_index[position])
    return EpisodeRef(
        dataset=number,
        episode_index=episode,
        first_row=first_row,
        length=int(index.length[position]),
        task=index.task[position],
        width=1.0,
        success=outcomes.get(episode) is Outcome.SUCCESS,
    )


def _kept(dataset: Dataset, sidecar: Sidecar | None) -> list[int]:
    """The positions of the episodes that the labels cover; what they left out on purpose is said."""
    if sidecar is None:
        return list(range(len(dataset.index().length)))
    check_source(dataset, sidecar)
    if sidecar.excluded:
        tell(f"{dataset.name}: {len(sidecar.excluded)} episodes are left out, as they were when it was labelled")
    return kept_positions(dataset, sidecar.excluded).tolist()


def _outcomes(dataset: Dataset, sidecar: Sidecar | None, *, needed: bool) -> dict[int, Outcome]:
    recorded = outcomes_of(sidecar) if sidecar is not None else {}
    if recorded:
        return {int(episode): Outcome.parse(word) for episode, word in recorded.items()}
    found = read_outcomes(dataset)
    if needed and found.unknown():
        raise OutcomeError(
            f"`--episodes success` needs the outcome of every episode; '{dataset.path}' does not say it of "
            f"{len(found.unknown())} of {len(found.by_episode)}: {listing(found.unknown())}. Mend: give outcomes to "
            "`regrasp returns --outcomes FILE`, label with `regrasp advantages`, and name the labels with --labels."
        )
    return found.by_episode


def _holdout(episodes: "list[EpisodeRef]", holdout: float, seed: int) -> Bool[np.ndarray, " E"]:
    from regrasp.learn.holdout import stratified_holdout

    if holdout == 0:
        return np.zeros(len(episodes), dtype=bool)
    strata = [(episode.dataset, episode.task, episode.success) for episode in episodes]
    return stratified_holdout(strata, holdout, seed)


def read_labels(
    found: PolicyEpisodes, *, negatives: Negatives, weighting: tuple[float, float] | None
) -> "list[FrameLabels]":
    """Return what is said of every row of every dataset, looked up by episode and frame.

    Args:
        found: The episodes, and the labels where there are any.
        negatives: What a frame labelled negative is trained as.
        weighting: Temperature and limit of advantage weights, which then stand in place of the condition.

    Raises:
        SidecarError: A frame has no label; the episodes are named.
    """
    from regrasp.learn.policy_data import FrameLabels, advantage_weights

    totals = [dataset.index().total for dataset in found.datasets]
    if found.labels is None:
        return [FrameLabels(indicator=np.zeros(n, np.float32), weight=np.ones(n, np.float32)) for n in totals]
    columns = [_columns(dataset, sidecar) for dataset, sidecar in zip(found.datasets, found.labels, strict=True)]
    if weighting is None:
        return [
            FrameLabels(indicator=indicator(positive, negatives), weight=np.ones(len(positive), np.float32))
            for positive, _ in columns
        ]
    advantages, counted = [advantage for _, advantage in columns], _trained_rows(found, totals)
    weights = advantage_weights(advantages, counted, temperature=weighting[0], limit=weighting[1])
    return [FrameLabels(indicator=np.zeros(len(w), np.float32), weight=w) for w in weights]


def _columns(dataset: Dataset, sidecar: Sidecar) -> tuple[np.ndarray, np.ndarray]:
    """Label and advantage of every row of a dataset; rows of episodes that were left out are never trained on."""
    index = dataset.index()
    kept = kept_positions(dataset, sidecar.excluded)
    rows = np.repeat(np.isin(np.arange(len(index.length)), kept), index.length)
    found = sidecar.stream(["advantage", "advantage_continuous"], kept).take(int(rows.sum()))
    positive, advantage = np.zeros(index.total, dtype=bool), np.zeros(index.total)
    positive[rows], advantage[rows] = found["advantage"], found["advantage_continuous"]
    return positive, advantage


def _trained_rows(found: PolicyEpisodes, totals: list[int]) -> list[np.ndarray]:
    rows = [np.zeros(total, dtype=bool) for total in totals]
    for episode in found.part(held_out=False):
        rows[episode.dataset][episode.first_row : episode.first_row + episode.length] = True
    return rows


def held_out_groups(
    found: PolicyEpisodes, place: np.ndarray, rows: np.ndarray, labels: "list[FrameLabels]"
) -> dict[str, Bool[np.ndarray, " n"]]:
    """Return which held-out frames are of demonstrations and of rollouts, and which are labelled how.

    Args:
        found: The episodes.
        place: Each frame's episode, as its place among the held-out ones.
        rows: Its row within the episode.
        labels: Of every row.
    """
    held_out = found.part(held_out=True)
    dataset = np.array([episode.dataset for episode in held_out], dtype=np.int64)[place]
    at = np.array([episode.first_row for episode in held_out], dtype=np.int64)[place] + rows
    demo = np.array([d.source is Source.DEMO for d in found.datasets])[dataset]
    said = np.zeros(len(at), dtype=np.float32)
    for number, label in enumerate(labels):
        said[dataset == number] = label.indicator[at[dataset == number]]
    groups = {"positive": said > 0, "negative": said < 0, "demo": demo, "rollout": ~demo}
    return {name: chosen for name, chosen in groups.items() if chosen.any()}

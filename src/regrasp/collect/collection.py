"""Running and recording together: groups of episodes until there are enough, in a way that can be taken up again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from regrasp.collect.environment import Environment
from regrasp.collect.recording import Recording
from regrasp.collect.rollout import EpisodeRecord, RolloutPolicy, run_group
from regrasp.core.errors import ConfigError

_PURPOSES = {"demo": 0, "rollout": 1, "evaluate": 2}


def episode_seeds(seed: int, episodes: int, purpose: Literal["demo", "rollout", "evaluate"]) -> list[int]:
    """Return the seed of each episode of a run.

    Args:
        seed: the run's seed, at least 0.
        episodes: how many. A longer run begins with the shorter one's episodes.
        purpose: runs of different purposes share no initial states, so that no policy is judged on what it learned.

    Raises:
        ConfigError: a negative seed, or no episode.
    """
    if seed < 0 or episodes < 1:
        raise ConfigError(f"A run has a seed of at least 0 and at least 1 episode; found {seed} and {episodes}.")
    return np.random.SeedSequence([seed, _PURPOSES[purpose]]).generate_state(episodes).tolist()


def collect(
    recording: Recording,
    start: Callable[[], tuple[Environment, RolloutPolicy]],
    seeds: Sequence[int],
    *,
    group: int,
    successes: int | None = None,
) -> Iterator[bool]:
    """Record one episode for each seed, and yield for each whether it was a success.

    A group of which an episode is missing is run again as a whole, so that its episodes come out as they would have
    without an interruption; those that were saved are kept.

    Args:
        recording: where episodes are kept; those that it has are not run again.
        start: gives the environment and the policy; called when the first episode has to be run.
        seeds: of the episodes, whose numbers are their places here.
        group: how many run together, the environment's copies.
        successes: stop after the group with which there are this many; all seeds if not given.
    """
    saved = recording.finished()
    running: tuple[Environment, RolloutPolicy] | None = None
    won = 0
    try:
        for first in range(0, len(seeds), group):
            numbers = range(first, min(first + group, len(seeds)))
            if any(number not in saved for number in numbers):
                running = running or start()
                for number, episode in zip(numbers, run_group(*running, [seeds[n] for n in numbers]), strict=True):
                    if number not in saved:
                        recording.save(number, episode)
                        saved[number] = episode.success
            won += sum(saved[number] for number in numbers)
            yield from (saved[number] for number in numbers)
            if successes is not None and won >= successes:
                return
    finally:
        if running is not None:
            running[0].close()


def first_of_each(wanted: int) -> Callable[[EpisodeRecord], str | None]:
    """Return a filter that names the first ``wanted`` successes and failures it sees, and gives None for the rest."""
    seen = {"success": 0, "failure": 0}

    def name(episode: EpisodeRecord) -> str | None:
        kind = "success" if episode.success else "failure"
        seen[kind] += 1
        return f"{kind}_{seen[kind]:02d}" if seen[kind] <= wanted else None

    return name

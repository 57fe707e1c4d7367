"""What a dataset's metadata and its files say differently."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from regrasp.core.errors import listing
from regrasp.data.layout import Layout
from regrasp.data.problem import Problem, error, warning


@runtime_checkable
class FoundEpisode(Protocol):
    """An episode as the files hold it."""

    number: int
    length: int
    task: object
    task_changes: bool


def task_text(
    layout: Layout, episode: FoundEpisode, *, column: str | None, texts: bool, problems: list[Problem]
) -> str:
    """Return the task of an episode; empty, with a problem, where there is none.

    Args:
        layout: The dataset's metadata.
        episode: The episode.
        column: Where ``episode.task`` was read; None where the data has no such column.
        texts: Whether it holds texts, and not ``task_index``.
        problems: Takes what is found wrong.
    """
    row = layout.episodes.get(episode.number)
    listed = row.tasks if row is not None else ()
    if episode.task_changes:
        text = f"the task changes within episode {episode.number}; its first frame's counts for the whole episode"
        problems.append(warning(text, "split the episode where the task changes"))
    if texts:
        if isinstance(episode.task, str) and episode.task.strip():
            return episode.task
        problems.append(error(f"episode {episode.number} has no text in {column!r}", "fill in the column"))
        return ""
    if column is None:
        if len(listed) == 1:
            return listed[0]
        text = f"episode {episode.number} has no task_index and its metadata lists {len(listed)} tasks"
        problems.append(error(text, "give each episode one task in the metadata"))
        return ""
    found = layout.tasks.get(episode.task if isinstance(episode.task, int) else int(str(episode.task)))
    if found is None:
        message = f"episode {episode.number} has task_index {episode.task}, which meta/tasks has no text for"
        problems.append(error(message, "add the task's text to meta/tasks"))
        return ""
    if listed and found not in listed:
        message = f"episode {episode.number}: the data says task {found!r}, the metadata {listing(map(repr, listed))}"
        problems.append(warning(message + "; the data's is used", "correct the metadata"))
    return found


def compare_with_metadata(layout: Layout, episodes: Sequence[FoundEpisode], problems: list[Problem]) -> None:
    """Add a problem for every episode or count that the metadata and the data do not agree on."""
    unreadable = any(problem.level == "error" for problem in problems)
    lengths = {episode.number: episode.length for episode in episodes}
    empty = sorted(set(layout.episodes) - set(lengths))
    if not lengths and not unreadable:
        problems.append(error("the dataset has no frames", "record some episodes"))
    elif empty and not unreadable:
        text = f"the metadata lists episodes without any frame in the data: {listing(empty)}"
        problems.append(error(text, "remove them from the metadata, or restore their data"))
    unlisted = sorted(set(lengths) - set(layout.episodes))
    if unlisted:
        text = f"the data holds episodes that the metadata does not list: {listing(unlisted)}"
        problems.append(warning(text, "add them to the metadata; without it their videos cannot be found"))
    for number, row in sorted(layout.episodes.items()):
        if row.length is not None and number in lengths and row.length != lengths[number]:
            text = f"episode {number}: the metadata says {row.length} frames, the data holds {lengths[number]}"
            problems.append(warning(text + "; the data counts", "correct the metadata"))
    for name, counted in (("total_episodes", len(lengths)), ("total_frames", sum(lengths.values()))):
        said = layout.info.get(name)
        if said is not None and said != counted:
            problems.append(warning(f"info.json says {name} {said}, the data holds {counted}", "correct info.json"))

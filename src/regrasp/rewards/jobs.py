"""What is to be judged: an episode's videos and its task, and for rubrics how its steps are marked."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from regrasp.core.errors import ConfigError, listing, nearest
from regrasp.core.provenance import digest, file_digest
from regrasp.data.dataset import Dataset

FIELDS = ("id", "task", "videos")
RUBRIC_FIELDS = (*FIELDS, "robot", "cameras", "rubric")
_MARKS_TOLERANCE = 1e-6
Control = Literal["reversed", "truncated", "frozen", "wrong instruction", "prefix", "reversed prefix"]
"""How an attempt is spoilt to see whether a judge notices, or shown in part to see how its scores follow time."""
CONTROLS: tuple[Control, ...] = ("reversed", "truncated", "frozen", "wrong instruction")
"""Those that spoil a success."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What a step may earn: ``points`` for what ``label`` describes."""

    label: str
    points: float


@dataclass(frozen=True, kw_only=True)
class RubricStep:
    """One step of a task and the grades that it may get."""

    action: str
    grading: tuple[Grade, ...]

    @property
    def full(self) -> float:
        """The most points of the step."""
        return max(grade.points for grade in self.grading)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """Where a job's episode lies in a dataset."""

    dataset: Dataset
    number: int
    cameras: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing to judge.

    Attributes:
        id: Its name, the only one in a run.
        task: The instruction, as it was given to the robot.
        videos: The files of its cameras, in order; none where ``episode`` says where they are.
        robot: The robot, in words.
        cameras: A description of each camera, in order.
        rubric: The steps of a rubric.
        episode: The episode of a dataset.
        control: How it is changed on purpose: played backwards, cut to its first third, its first frame throughout,
            with another instruction as ``task``, or only its beginning, forwards or backwards.
        shown: The share of the attempt that is shown, from its start as it is played.
    """

    id: str
    task: str
    videos: tuple[Path, ...] = ()
    robot: str | None = None
    cameras: tuple[str, ...] = ()
    rubric: tuple[RubricStep, ...] = ()
    episode: Episode | None = None
    control: Control | None = None
    shown: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what is no text, such as a file's name in another encoding (no server and no row takes it).

        Raises:
            ConfigError: The id, the task or a video's name is none, or a view is named twice.
        """
        for text in (self.id, self.task, *map(str, self.videos)):
            _refuse_half_characters(text, f"{text[:200]!a}")
        views = [*map(str, self.videos), *(self.episode.cameras if self.episode is not None else ())]
        twice = next((view for view in views if views.count(view) > 1), None)
        if twice is not None:
            message = f"Job {self.id!r} shows '{twice}' {views.count(twice)} times. Mend: name each view once."
            raise ConfigError(message)

    @property
    def digest(self) -> str:
        """A digest of what is judged: another task, rubric, dataset or video is another job."""
        steps = [[step.action, [[g.label, g.points] for g in step.grading]] for step in self.rubric]
        source: object = [file_digest(path) for path in self.videos]
        if self.episode is not None:
            place = self.episode
            source = [place.dataset.name, place.dataset.index().fingerprint, place.number, list(place.cameras)]
        spoilt = [] if self.control is None else [self.control, *([self.shown] if self.shown != 1 else [])]
        return digest([self.task, self.robot, list(self.cameras), steps, source, *spoilt])


def _refuse_half_characters(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        message = f"{place} is no text in Unicode: {half!a} is no character. Mend: write it in UTF-8."
        raise ConfigError(message) from None


def read_jobs(path: Path, *, rubric: bool = False) -> list[Job]:
    """Read a file of JSON lines, one job each; video paths start from the file's own folder.

    Args:
        path: The file.
        rubric: Whether each job must hold a rubric; without, rubric fields are refused.

    Raises:
        ConfigError: A line cannot be understood; the line and the field are named.
    """
    if not path.is_file():
        message = f"There is no jobs file '{path}'. Mend: correct --jobs."
        raise ConfigError(message)
    jobs: list[Job] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if not line.strip():
            continue
        place = f"'{path}', line {number}"
        job = _job(_parsed(line, place), place, path.parent, rubric=rubric)
        if job.id in lines:
            message = f"{place}: the id {job.id!r} is that of line {lines[job.id]} too. Mend: give each job its own id."
            raise ConfigError(message)
        lines[job.id] = number
        jobs.append(job)
    if not jobs:
        message = f"'{path}' holds no job. Mend: give one JSON object a line, with {listing(FIELDS)}."
        raise ConfigError(message)
    return jobs


def read_utf8(path: Path) -> str:
    """Return a file's text.

    Raises:
        ConfigError: It is no text in UTF-8, or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"'{path}' is no text in UTF-8 (its byte {error.start} is none). Mend: save it as UTF-8."
        raise ConfigError(message) from None
    except OSError as error:
        message = f"'{path}' cannot be read ({error.strerror}). Mend: correct the path or the file's permissions."
        raise ConfigError(message) from None


def _parsed(
    text: str, place: str, what: str = "a job is one JSON object a line with id, task, videos"
) -> dict[str, Any]:
    try:
        fields = json.loads(text, object_pairs_hook=partial(_fields, place))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if "\n" in text.strip() else f"column {error.colno}"
        raise ConfigError(f"{place} is not JSON ({error.msg}, {at}). Mend: {what}.") from None
    except ConfigError:
        raise
    except ValueError:  # of Python's own limits
        raise ConfigError(f"{place} holds a number of too many digits. Mend: {what}.") from None
    except RecursionError:
        raise ConfigError(f"{place} is nested too deeply. Mend: {what}.") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{place} holds a {type(fields).__name__}; {what}.")
    _refuse_half_characters(json.dumps(fields, ensure_ascii=False), place)
    return fields


def _fields(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields; of one that is given twice JSON would take the last, unsaid."""
    times = Counter(name for name, _ in pairs)
    twice = next((name for name, count in times.items() if count > 1), None)
    if twice is not None:
        message = f"{place}: the field {twice!r} is given {times[twice]} times. Mend: give it once."
        raise ConfigError(message)
    return dict(pairs)


def _job(fields: dict[str, Any], place: str, folder: Path, *, rubric: bool) -> Job:
    known = RUBRIC_FIELDS if rubric else FIELDS
    _refuse_unknown(fields, known, place, hint="" if rubric else " Rubrics belong to `regrasp annotate rubric`.")
    videos = fields.get("videos")
    if not (isinstance(videos, list) and videos and all(isinstance(v, str) and v for v in videos)):
        message = f"{place}: 'videos' is a list of at least one path; found {videos!r}. Mend: name the cameras' files."
        raise ConfigError(message)
    job = Job(
        id=_text(fields, "id", place),
        task=_text(fields, "task", place),
        videos=tuple(folder / _expanded(video) for video in videos),
    )
    return job if not rubric else with_rubric(job, fields, place)


def _expanded(path: str) -> Path:
    """The path with ~ as the home folder; a ~name of no user stays, and is then no such file."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own raises for a user that there is not


def _refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], place: str, hint: str = "") -> None:
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        message = f"{place}: unknown field {unknown!r}.{nearest(unknown, known)} Known are: {listing(known)}.{hint}"
        raise ConfigError(message)


def _text(fields: Mapping[str, Any], name: str, place: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        found = "nothing" if name not in fields else repr(value)
        why = "; a judge is told what was wanted, and nothing is assumed" if name == "task" else ""
        message = f"{place}: {name!r} is a text that is not empty{why}; found {found}. Mend: give it."
        raise ConfigError(message)
    return value


def read_rubric(path: Path) -> dict[str, Any]:
    """Read a JSON file with ``rubric`` and, where wanted, ``robot`` and ``cameras``, for jobs that have none of these.

    Raises:
        ConfigError: It cannot be read.
    """
    if not path.is_file():
        message = f"There is no rubric file '{path}'. Mend: correct --rubric."
        raise ConfigError(message)
    fields = _parsed(read_utf8(path), f"'{path}'", "a rubric file is one JSON object with rubric, robot, cameras")
    _refuse_unknown(fields, ("robot", "cameras", "rubric"), f"'{path}'")
    return fields


def with_rubric(job: Job, fields: Mapping[str, Any], place: str) -> Job:
    """Return the job with the rubric, robot and cameras of ``fields``.

    Raises:
        ConfigError: The rubric cannot be understood, or its full marks do not sum to 1.
    """
    given = fields.get("rubric")
    if not isinstance(given, list) or not given:
        message = f"{place}: 'rubric' is a list of steps, each with 'action' and 'grading'; found {given!r}."
        raise ConfigError(message)
    steps = tuple(_step(step, f"{place}, step {n}") for n, step in enumerate(given, 1))
    total = sum(step.full for step in steps)
    if abs(total - 1.0) > _MARKS_TOLERANCE:
        marks = " + ".join(f"{step.full:g}" for step in steps)
        message = f"{place}: the steps' full marks sum to 1; found {marks} = {total:g}. Mend: correct the points."
        raise ConfigError(message)
    cameras = fields.get("cameras", [])
    views = len(job.videos) if job.episode is None else len(job.episode.cameras)
    if not isinstance(cameras, list) or not all(isinstance(text, str) for text in cameras):
        message = f"{place}: 'cameras' is a list of descriptions, one a video; found {cameras!r}."
        raise ConfigError(message)
    if cameras and len(cameras) != views:
        message = f"{place}: {len(cameras)} cameras are described, and there are {views} videos. Mend: one for each."
        raise ConfigError(message)
    robot = _text(fields, "robot", place) if fields.get("robot") is not None else None
    return Job(
        id=job.id,
        task=job.task,
        videos=job.videos,
        robot=robot,
        cameras=tuple(cameras),
        rubric=steps,
        episode=job.episode,
    )


def _step(fields: object, place: str) -> RubricStep:
    if not isinstance(fields, dict):
        message = f"{place} is an object with 'action' and 'grading'; found {fields!r}."
        raise ConfigError(message)
    _refuse_unknown(fields, ("action", "grading"), place)
    grading = fields.get("grading")
    if not isinstance(grading, list) or len(grading) < 2:
        message = f"{place}: 'grading' is a list of at least two grades, each with 'label' and 'points'."
        raise ConfigError(message)
    grades = tuple(_grade(grade, place) for grade in grading)
    if len({grade.points for grade in grades}) != len(grades):
        message = f"{place}: two grades have the same points, so an answer would not tell them apart."
        raise ConfigError(message)
    return RubricStep(action=_text(fields, "action", place), grading=grades)


def _grade(fields: object, place: str) -> Grade:
    if not isinstance(fields, dict):
        message = f"{place}: a grade is an object with 'label' and 'points'; found {fields!r}."
        raise ConfigError(message)
    _refuse_unknown(fields, ("label", "points"), place)
    points = fields.get("points")
    if isinstance(points, bool) or not isinstance(points, int | float) or not 0 <= points <= 1:
        message = f"{place}: 'points' is a number from 0 to 1; found {points!r}."
        raise ConfigError(message)
    return Grade(label=_text(fields, "label", place), points=float(points))


def episode_jobs(dataset: Dataset, cameras: Sequence[str], episodes: Sequence[int] | None) -> list[Job]:
    """Return a job for each episode of a dataset.

    Args:
        dataset: The dataset.
        cameras: The cameras' names, in the order of the collage; may be left out where there is only one.
        episodes: Their numbers; all where it is None.

    Raises:
        ConfigError: There is no such camera or episode, cameras were not named, or an episode has no task.
    """
    named = tuple(cameras) or (tuple(dataset.cameras) if len(dataset.cameras) == 1 else ())
    has = f"it has: {listing(dataset.cameras, 20) or 'none'}"
    if not named:
        message = f"Name the cameras of '{dataset.path}' with --cameras, in the collage's order; {has}."
        raise ConfigError(message)
    stranger = next((name for name in named if name not in dataset.cameras), None)
    if stranger is not None:
        message = f"'{dataset.path}' has no camera {stranger!r}; {has}.{nearest(stranger, dataset.cameras)}"
        raise ConfigError(message)
    index = dataset.index()
    known = dict.fromkeys(index.episode_index.tolist())
    wanted = list(known) if episodes is None else list(episodes)
    missing = [number for number in wanted if number not in known]
    if missing:
        message = f"'{dataset.path}' has no episodes {listing(missing)}; it has {listing(known)}. Mend: --episodes."
        raise ConfigError(message)
    jobs = []
    for number in wanted:
        task = index.task[index.position(number)]
        if not task.strip():
            message = f"Episode {number} of '{dataset.path}' has no task text, and nothing is assumed. Mend: record it."
            raise ConfigError(message)
        place = Episode(dataset=dataset, number=number, cameras=named)
        jobs.append(Job(id=f"{dataset.name}/{number}", task=task, episode=place))
    return jobs

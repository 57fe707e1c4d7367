"""What a dataset holds and what is wrong with it, as plain values for a page or a script."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from regrasp.core.errors import RegraspError, listing
from regrasp.core.outcome import Source
from regrasp.data.dataset import Camera, Dataset
from regrasp.data.index import EpisodeIndex
from regrasp.data.outcomes import read_outcomes
from regrasp.data.probe import VideoFacts, probe
from regrasp.data.problem import Problem, error, warning
from regrasp.data.sidecar import SCHEMAS, read_provenance

_VALUE_STAGES = ("value fit", "value predict")
_MEND_VIDEO = (
    "restore it, or go on without this camera: --cameras with the others, or --cameras none; "
    "returns, advantages and relabel need no video"
)


def examine(dataset: Dataset) -> dict[str, Any]:
    """Return everything that `regrasp inspect` shows of one dataset.

    Reads every data file and every video's header once; decodes nothing.

    Returns:
        JSON values: layout, robot, fps, counts, tasks, cameras, outcomes, corrections, sidecars, and ``problems`` with
        level, text, mend and the stages that each blocks.
    """
    index = dataset.survey()
    problems = [*[warning(note, "correct meta/") for note in dataset.meta.notes], *index.problems]
    report: dict[str, Any] = {
        "path": str(dataset.path),
        "name": dataset.name,
        "layout": dataset.layout,
        "robot": dataset.robot_type,
        "fps": dataset.fps,
        "episodes": len(index.length),
        "frames": index.total,
        "episode_frames": _range(index.length),
        "tasks": {task: count for task, count in sorted(Counter(index.task).items()) if task},
        "state": dataset.state_key,
        "fingerprint": index.fingerprint,
        "cameras": [_camera(dataset, index, name, problems) for name in dataset.cameras],
    }
    broken = any(problem.level == "error" for problem in index.problems)
    report["outcomes"] = {} if broken else _outcomes(dataset, problems)
    report["corrections"] = _corrections(dataset, problems) if not broken else {}
    if not broken:
        _check_features(dataset, problems)
        _check_state(dataset, index, problems)
    report["sidecars"] = _sidecars(dataset, index, problems)
    report["problems"] = [problem.__dict__ | {"blocks": list(problem.blocks)} for problem in problems]
    return report


def _range(values: np.ndarray) -> dict[str, int]:
    if not len(values):
        return {}
    return {"least": int(values.min()), "median": int(np.median(values)), "most": int(values.max())}


def _camera(dataset: Dataset, index: EpisodeIndex, name: str, problems: list[Problem]) -> dict[str, Any]:
    camera = dataset.cameras[name]
    shown: dict[str, Any] = {"name": name, "key": camera.key, "kind": camera.kind, "codec": camera.codec}
    shown |= {"height": camera.height, "width": camera.width, "missing": []}
    if camera.kind == "image":
        if camera.key in dataset.columns:
            return shown
        text = f"the data has no column {camera.key!r}, where the images of {name!r} should be"
        problems.append(error(text, _MEND_VIDEO, _VALUE_STAGES))
        return shown | {"missing": ["the column itself"]}
    files: dict[Path, list[int]] = {}
    unknown = []
    for place, number in enumerate(index.episode_index.tolist()):
        try:
            files.setdefault(dataset.video_span(name, number).path, []).append(place)
        except RegraspError:
            unknown.append(number)
    if unknown:
        text = f"where {name!r} shows the episodes {_short(unknown)} is not said"
        problems.append(error(text, _MEND_VIDEO, _VALUE_STAGES))
    for path, places in files.items():
        facts = probe(path)
        if facts.trouble is not None:
            shown["missing"].append(str(path))
        else:
            shown |= {"codec": facts.codec, "height": facts.height, "width": facts.width}
        problems += _video_problems(name, camera, path, facts, index, places)
    return shown


def _video_problems(
    name: str, camera: Camera, path: Path, facts: VideoFacts, index: EpisodeIndex, places: list[int]
) -> list[Problem]:
    episodes = f"episodes {_short(index.episode_index[places].tolist())}"
    if facts.trouble is not None:
        return [error(f"the video '{path}' of {name!r} {facts.trouble} ({episodes})", _MEND_VIDEO, _VALUE_STAGES)]
    found = []
    frames = int(index.length[places].sum())
    if 0 < facts.frames < frames:
        text = f"the video '{path}' of {name!r} holds {facts.frames} frames, its {episodes} have {frames}"
        found.append(error(text, _MEND_VIDEO, _VALUE_STAGES))
    said = (camera.height, camera.width)
    if None not in said and said != (facts.height, facts.width):
        text = f"info.json says {name!r} is {said[1]}x{said[0]}, '{path}' is {facts.width}x{facts.height}"
        found.append(warning(text, "correct info.json; the file counts"))
    return found


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:6])) + (f" and {len(numbers) - 6} more" if len(numbers) > 6 else "")


def _outcomes(dataset: Dataset, problems: list[Problem]) -> dict[str, Any]:
    try:
        outcomes = read_outcomes(dataset)
    except RegraspError as trouble:
        text, _, mend = str(trouble).rstrip(".").partition(". Mend: ")
        problems.append(error(text, mend or "name one outcome sidecar", ("returns",)))
        return {}
    unknown = outcomes.unknown()
    reasons = sorted({outcomes.read_from[number] for number in unknown})
    if unknown and dataset.source is Source.ROLLOUT:
        text = f"the outcome of {len(unknown)} episodes is unknown ({'; '.join(reasons)}): {_short(unknown)}"
        mend = "fine for demonstrations; as rollouts, give --outcomes FILE.csv, or --unknown exclude"
        problems.append(warning(text, mend))
    sources = sorted({where for number, where in outcomes.read_from.items() if number not in unknown})
    return {**outcomes.count(), "read_from": sources}


def _corrections(dataset: Dataset, problems: list[Problem]) -> dict[str, Any]:
    name = dataset.correction_column()
    if name is None:
        return {}
    index, frames, episodes = dataset.index(), 0, 0
    try:
        stream = dataset.stream([name])
        for length in index.length.tolist():
            flags = np.asarray(stream.take(length)[name])
            count = int((flags.reshape(len(flags), -1)[:, 0] != 0).sum())
            frames, episodes = frames + count, episodes + (count > 0)
    except RegraspError as trouble:
        problems.append(error(str(trouble).rstrip("."), "correct the column", ("advantages", "relabel")))
        return {"column": name}
    return {"column": name, "frames": frames, "episodes": episodes}


def _check_features(dataset: Dataset, problems: list[Problem]) -> None:
    cameras = {camera.key for camera in dataset.cameras.values()}
    absent = sorted(set(dataset.features) - cameras - set(dataset.columns))
    if absent:
        text = f"info.json lists features that the data has no column for: {listing(absent)}"
        problems.append(warning(text, "correct info.json"))
    unlisted = sorted(set(dataset.columns) - set(dataset.features)) if dataset.features else []
    if unlisted:
        text = f"the data has columns that info.json does not list: {listing(unlisted)}"
        problems.append(warning(text, "add them to info.json; LeRobot does not read them"))


def _check_state(dataset: Dataset, index: EpisodeIndex, problems: list[Problem]) -> None:
    name = dataset.state_key
    if name is None or name not in dataset.columns:
        return
    shape = list(dataset.features.get(name, {}).get("shape") or [])
    try:
        stream = dataset.stream([name])
        for position, length in enumerate(index.length.tolist()):
            rows = np.asarray(stream.take(length)[name], dtype=np.float64).reshape(length, -1)
            if position == 0 and shape and int(np.prod(shape)) != rows.shape[1]:
                text = f"info.json says that {name!r} has {int(np.prod(shape))} numbers, the data has {rows.shape[1]}"
                problems.append(warning(text, "correct info.json; the data counts"))
            bad = ~np.isfinite(rows).all(axis=1)
            if bad.any():
                where = f"episode {index.episode_index[position]}, frame {index.frames(position)[bad][0]}"
                text = f"{name!r} has NaN or infinity, first in {where}"
                problems.append(error(text, "correct the recording; returns does not read the state", _VALUE_STAGES))
                return
    except RegraspError as trouble:
        problems.append(error(str(trouble).rstrip("."), "record or convert the dataset again", _VALUE_STAGES))


def _sidecars(dataset: Dataset, index: EpisodeIndex, problems: list[Problem]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    for kind in SCHEMAS:
        for path in sorted(dataset.sidecar_dir.glob(f"{kind}_*.parquet")):
            entry: dict[str, Any] = {"kind": kind, "tag": path.stem.removeprefix(f"{kind}_"), "path": str(path)}
            try:
                provenance = read_provenance(path)
            except RegraspError as trouble:
                problems.append(warning(str(trouble).split(" Mend")[0].rstrip("."), "make it again with --overwrite"))
                shown.append(entry | {"state": "unreadable"})
                continue
            if provenance is None:
                shown.append(entry | {"state": "without provenance (not written by Regrasp)"})
                continue
            fresh = provenance.fingerprint == index.fingerprint
            if not fresh:
                text = f"{path.name} was made ({provenance.created}) from another version of this dataset"
                problems.append(warning(text, f"make it again: regrasp {provenance.stage} … --overwrite"))
            lineage = {
                "state": "current" if fresh else "stale",
                "stage": provenance.stage,
                "created": provenance.created,
                "id": provenance.id,
                "inputs": provenance.inputs,
                "tags": provenance.notes.get("tags", {}),
            }
            shown.append(entry | lineage)
    _compare_lineage(shown, problems)
    return shown


_ROLES = {"returns": "returns", "values": "values", "source": "advantages"}
"""The kind of sidecar that each input of a later one is."""


def _compare_lineage(shown: list[dict[str, Any]], problems: list[Problem]) -> None:
    """Find sidecars whose inputs were made again since."""
    ids = {(entry["kind"], entry["tag"]): entry["id"] for entry in shown if "id" in entry}
    for entry in shown:
        for role, tag in entry.get("tags", {}).items():
            now, then = ids.get((_ROLES.get(role, role), tag)), entry.get("inputs", {}).get(role)
            if now is not None and then is not None and now != then and entry["state"] == "current":
                entry["state"] = "outdated"
                text = f"{entry['kind']} {entry['tag']!r} were made before {role} {tag!r} were made again"
                problems.append(warning(text, f"make them again: regrasp {entry['stage']} … --overwrite"))

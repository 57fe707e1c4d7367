"""Stage 1: a reward and a return for every frame, from the frames to the end and the outcome."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from regrasp.core.errors import ConfigError, OutcomeError, listing
from regrasp.core.outcome import Outcome, Source
from regrasp.core.provenance import Provenance, digest, today
from regrasp.core.scale import ReturnScale, ScaleScope, ScaleSet
from regrasp.data.dataset import Dataset
from regrasp.data.index import EpisodeIndex
from regrasp.data.outcomes import MEND, Outcomes, read_outcome_file, read_outcomes
from regrasp.data.rlinf import write_stats
from regrasp.data.sidecar import SidecarWriter, all_exist_same, coded, sidecar_path
from regrasp.data.storage import Transaction
from regrasp.recap.judge_rewards import JudgedRewards, frame_rewards, judged_tables, parse_rewards
from regrasp.recap.outcome_signal import one_sided
from regrasp.recap.selection import Selection, StageResult, next_command, open_datasets, tell
from regrasp.rl.returns import FailureReturn, return_table

_ROWS = 1 << 18
_MOST_FRAMES = 1 << 24
"""Up to here, float32 tells one frame from the next."""


@dataclass(frozen=True, kw_only=True)
class ReturnsConfig(Selection):
    """Compute a return for every frame."""

    tag: str
    """The name of this set of returns: meta/returns_TAG.parquet."""
    failure_penalty: float | Literal["task_horizon"] = "task_horizon"
    """C, in frames, of the last frame of a failure; task_horizon is the longest episode of its task in this run."""
    failure_return: FailureReturn = "longer_is_worse"
    """Whether a failure also pays -1 a frame, or ('flat') has the same return -C at every frame."""
    gamma: float = 1.0
    """The discount per frame, in [0, 1]."""
    scale: ScaleScope = "task"
    """Whether returns are scaled to [-1, 0] for each task (the paper) or for all data together (RLinf)."""
    outcomes: Path | None = None
    """A .csv or .parquet file of outcomes: episode_index, outcome and, for several rollout datasets, dataset."""
    outcomes_tag: str | None = None
    """The outcome sidecar to read where there are several."""
    unknown: Literal["error", "exclude"] = "error"
    """What to do with episodes whose outcome is unknown."""
    rewards: str | None = None
    """A judge's scores: dense:TAG in place of -1 a frame, or rubric:TAG to add a rubric's points at the end."""
    map: str | None = None
    """With dense:TAG a frame's reward for each score, such as '{1: -2, 2: -1.5, 3: -1}'; with rubric:TAG what full
    marks are worth in frames, such as 100."""
    update_meta: bool = False
    """Also write RLinf's return and reward statistics into the datasets' meta/stats.json."""
    overwrite: bool = False
    """Replace returns of this tag that were made otherwise."""
    dry_run: bool = False
    """Say what would be written, and write nothing."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What is known of one dataset before a row is written."""

    dataset: Dataset
    index: EpisodeIndex
    outcomes: Outcomes
    keep: np.ndarray
    """Positions of the episodes that get returns."""
    table: np.ndarray
    """Which table of returns each kept episode takes."""
    scores: str | None = None
    """The digest of a judge's scores, where they give the rewards."""


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """Rewards and returns by frames to the end, one row for each way in which episodes end."""

    rewards: np.ndarray
    returns: np.ndarray
    penalties: dict[str, float]


def run(config: ReturnsConfig) -> StageResult:
    """Write ``returns_{tag}.parquet`` for every dataset of the run.

    Raises:
        ConfigError: A setting is out of range.
        OutcomeError: Outcomes are unknown, with the episodes.
        SidecarError: The tag exists with another content.
    """
    _check(config)
    datasets = open_datasets(config, flags=True)
    given = _given_outcomes(config, datasets)
    read = [(dataset, read_outcomes(dataset, given.get(dataset.name), tag=config.outcomes_tag)) for dataset in datasets]
    _refuse_unknown(config, read)
    judged = parse_rewards(config.rewards, config.map)
    parts, tables = _plan(config, read, judged)
    if judged is not None:
        parts, tables = _with_judged(config, parts, tables, judged)
    scales = _scales(config, parts, tables)
    plans = [(part, _provenance(config, part, tables, scales, judged)) for part in parts]
    lines = _summary(parts, tables, scales)
    paths = [sidecar_path(part.dataset, "returns", config.tag) for part in parts]

    def all_there() -> bool:
        return all_exist_same(zip(paths, (made for _, made in plans), strict=True), overwrite=config.overwrite)

    if (all_there() and not config.update_meta) or config.dry_run:
        verb = "Would write" if config.dry_run else "Already there, and the same:"
        return StageResult(lines=[*lines, f"{verb} {listing(map(str, paths))}"], written=[])
    with Transaction() as transaction:
        for (part, provenance), path in zip(plans, paths, strict=True):
            writer = SidecarWriter(transaction, path, "returns")
            _write_rows(writer, part, tables)
            writer.close(provenance)
            if config.update_meta:
                write_stats(transaction, part.dataset, provenance.statistics)
        transaction.commit(all_there)
    following = next_command("value fit", datasets, config, f"--returns {shlex.quote(config.tag)} --output runs/value")
    return StageResult(lines=[*lines, f"Wrote {listing(map(str, paths))}", f"Next: {following}"], written=paths)


def _check(config: ReturnsConfig) -> None:
    if not 0.0 <= config.gamma <= 1.0:
        message = f"--gamma lies in [0, 1]; found {config.gamma}."
        raise ConfigError(message)
    if config.rewards is not None and config.failure_return == "flat":
        message = "--failure-return flat gives the frames of a failure no cost, so it does not go with --rewards."
        raise ConfigError(message)
    penalty = config.failure_penalty
    if penalty != "task_horizon" and not 0 <= penalty <= _MOST_FRAMES:
        message = (
            f"--failure-penalty is a number of frames from 0 to {_MOST_FRAMES}, or task_horizon; found {penalty:g}."
        )
        raise ConfigError(message)


def _given_outcomes(config: ReturnsConfig, datasets: list[Dataset]) -> dict[str, dict[int, Outcome]]:
    if config.outcomes is None:
        return {}
    rollouts = [dataset.name for dataset in datasets if dataset.source is Source.ROLLOUT]
    return read_outcome_file(config.outcomes, rollouts or [dataset.name for dataset in datasets])


def _refuse_unknown(config: ReturnsConfig, read: list[tuple[Dataset, Outcomes]]) -> None:
    for dataset, outcomes in read:
        for text in outcomes.warnings:
            tell(text)
        unknown = outcomes.unknown()
        if not unknown:
            continue
        reasons = sorted({outcomes.read_from[number] for number in unknown})
        what = (
            f"the outcome of {len(unknown)} of {len(outcomes.by_episode)} episodes of '{dataset.path}' is unknown "
            f"({listing(reasons, 3)}): {listing(unknown)}"
        )
        if config.unknown == "error":
            message = f"Returns need to know how each rollout ended, but {what}. {MEND}."
            raise OutcomeError(message)
        tell(what + "; they are left out")
    kept = [outcome for _, outcomes in read for outcome in outcomes.by_episode.values()]
    if all(outcome is Outcome.UNKNOWN for outcome in kept):
        message = f"No episode of the run has a known outcome, so there is nothing to compute. {MEND.split(', or')[0]}."
        raise OutcomeError(message)


def _plan(
    config: ReturnsConfig, read: list[tuple[Dataset, Outcomes]], judged: JudgedRewards | None
) -> tuple[list[_Part], _Tables]:
    """Give every kept episode its table: the first for successes, one more for each penalty."""
    horizon: dict[str, int] = {}
    for dataset, _ in read:
        index = dataset.index()
        for task, length in zip(index.task, index.length.tolist(), strict=True):
            horizon[task] = max(horizon.get(task, 0), length)
    fixed = config.failure_penalty
    least = float if judged is None else judged.horizon_penalty  # so that every failure still lies below every success
    penalties = {task: least(frames) if fixed == "task_horizon" else float(fixed) for task, frames in horizon.items()}
    kinds = [None, *sorted(set(penalties.values()))]
    longest = max(horizon.values())
    made = [
        return_table(
            longest,
            success=penalty is None,
            failure_penalty=penalty or 0.0,
            failure_return=config.failure_return,
            discount=config.gamma,
        )
        for penalty in kinds
    ]
    tables = _Tables(
        rewards=np.array([r for r, _ in made]), returns=np.array([g for _, g in made]), penalties=penalties
    )
    parts = []
    for dataset, outcomes in read:
        index = dataset.index()
        ended = [outcomes.by_episode[int(number)] for number in index.episode_index]
        keep = np.array([p for p, outcome in enumerate(ended) if outcome is not Outcome.UNKNOWN], dtype=np.int64)
        table = [0 if ended[p] is Outcome.SUCCESS else kinds.index(penalties[index.task[p]]) for p in keep]
        parts.append(
            _Part(dataset=dataset, index=index, outcomes=outcomes, keep=keep, table=np.array(table, dtype=np.int64))
        )
    return parts, tables


def _with_judged(
    config: ReturnsConfig, parts: list[_Part], tables: _Tables, judged: JudgedRewards
) -> tuple[list[_Part], _Tables]:
    """Give every kept episode a table of its own, with what the outcome adds to its last reward."""
    longest, first = tables.returns.shape[1], 0
    changed, rewards, returns = [], [], []
    for part in parts:
        episodes, scores = frame_rewards(part.dataset, part.keep, judged)
        last = tables.rewards[part.table, 0]
        made = judged_tables(episodes, last, longest=longest, discount=config.gamma)
        rewards.append(made[0])
        returns.append(made[1])
        changed.append(replace(part, table=first + np.arange(len(part.keep)), scores=scores))
        first += len(part.keep)
    return changed, replace(tables, rewards=np.concatenate(rewards), returns=np.concatenate(returns))


def _scales(config: ReturnsConfig, parts: list[_Part], tables: _Tables) -> ScaleSet:
    least, most = (ufunc.accumulate(tables.returns, axis=1) for ufunc in (np.minimum, np.maximum))
    ends: dict[str, tuple[float, float]] = {}
    for part in parts:
        place = part.table, part.index.length[part.keep] - 1
        found = zip(*(table[place].astype(np.float32).tolist() for table in (least, most)), strict=True)
        for position, (low, high) in zip(part.keep.tolist(), found, strict=True):
            scope = "*" if config.scale == "global" else part.index.task[position]
            before = ends.get(scope, (0.0, 0.0))
            ends[scope] = min(before[0], low), max(before[1], high)
    flat = [scope for scope, (low, high) in ends.items() if low >= high]
    if flat:
        message = (
            f"Every return of {listing(map(repr, flat))} is 0: only one-frame successes, or a penalty of 0. "
            "There is no scale to learn values on. Mend: add longer episodes, or correct --gamma and --failure-penalty."
        )
        raise ConfigError(message)
    return ScaleSet(config.scale, {scope: ReturnScale(*pair) for scope, pair in ends.items()})


def _provenance(
    config: ReturnsConfig, part: _Part, tables: _Tables, scales: ScaleSet, judged: JudgedRewards | None
) -> Provenance:
    index, kept = part.index, part.keep
    ended = {
        str(int(index.episode_index[p])): part.outcomes.by_episode[int(index.episode_index[p])].value for p in kept
    }
    tasks = sorted({index.task[p] for p in kept})
    settings = {
        "source": part.dataset.source.value,
        "gamma": config.gamma,
        "failure_penalty": {task: tables.penalties[task] for task in tasks},
        "failure_return": config.failure_return,
        "scale": {task: [scales.for_task(task).low, scales.for_task(task).high] for task in tasks},
        "unknown": config.unknown,
    }
    if judged is not None:
        settings |= {"rewards": config.rewards, "map": config.map, **judged.settings()}
    return Provenance(
        stage="returns",
        config=settings,
        fingerprint=index.fingerprint,
        inputs={"outcomes": digest(ended)} | ({"rewards": part.scores} if part.scores else {}),
        scale=scales.to_json(),
        statistics=_statistics(part, tables),
        notes={"outcomes": ended, "excluded": part.outcomes.unknown()},
        created=today(),
    )


def _statistics(part: _Part, tables: _Tables) -> dict[str, dict[str, float]]:
    """Mean, population std, min and max over the dataset's frames, from the tables alone."""
    last = part.index.length[part.keep] - 1
    frames = float(part.index.length[part.keep].sum())
    found = {}
    for name, table in (("return", tables.returns), ("reward", tables.rewards)):
        rounded = table.astype(np.float32).astype(np.float64)
        mean = np.cumsum(rounded, axis=1)[part.table, last].sum() / max(frames, 1)
        square = np.cumsum((rounded - mean) ** 2, axis=1)[part.table, last].sum() / max(frames, 1)
        least = np.minimum.accumulate(rounded, axis=1)[part.table, last]
        most = np.maximum.accumulate(rounded, axis=1)[part.table, last]
        found[name] = {
            "mean": float(mean),
            "std": float(np.sqrt(square)),
            "min": float(least.min(initial=0.0)),
            "max": float(most.max(initial=-np.inf)) if len(most) else 0.0,
        }
    return found


def episode_batches(lengths: np.ndarray, rows: int) -> list[slice]:
    """Split whole episodes into batches of about ``rows`` rows (at least one episode each)."""
    batches, start, held = [], 0, 0
    for place, length in enumerate(lengths.tolist()):
        if held and held + length > rows:
            batches.append(slice(start, place))
            start, held = place, 0
        held += length
    return [*batches, slice(start, len(lengths))] if len(lengths) else []


def _write_rows(writer: SidecarWriter, part: _Part, tables: _Tables) -> None:
    index, longest = part.index, tables.returns.shape[1]
    texts = index.tasks
    codes = {text: code for code, text in enumerate(texts)}
    task = np.array([codes[text] for text in index.task], dtype=np.int32)
    rewards, returns = (table.astype(np.float32).ravel() for table in (tables.rewards, tables.returns))
    for batch in episode_batches(index.length[part.keep], _ROWS):
        positions, length = part.keep[batch], index.length[part.keep[batch]]
        episode, frame = index.keys(positions)
        to_the_end = np.repeat(np.cumsum(length), length) - 1 - np.arange(len(episode))
        place = np.repeat(part.table[batch] * longest, length) + to_the_end
        writer.write(
            {
                "episode_index": episode,
                "frame_index": frame,
                "return": returns[place],
                "reward": rewards[place],
                "prompt": coded(np.repeat(task[positions], length), texts),
            }
        )


def _summary(parts: list[_Part], tables: _Tables, scales: ScaleSet) -> list[str]:
    lines = []
    for part in parts:
        count = part.outcomes.count()
        where = listing(sorted({part.outcomes.read_from[int(part.index.episode_index[p])] for p in part.keep}))
        found = ", ".join(f"{number} {kind}" for kind, number in count.items() if number)
        kept, left_out = (
            int(part.index.length[part.keep].sum()),
            part.index.total - int(part.index.length[part.keep].sum()),
        )
        frames = f"{kept} frames" + (f" ({left_out} left out)" if left_out else "")
        lines.append(
            f"{part.dataset.name} ({part.dataset.source}): {frames}, {found} (read from: {where or 'nowhere'})"
        )
    episodes = [(part, p) for part in parts for p in part.keep]
    tasks = sorted({part.index.task[p] for part, p in episodes})
    for task in tasks[:8]:
        scale = scales.for_task(task)
        lines.append(f"  {task!r}: failure penalty {tables.penalties[task]:g}, returns {scale.low:g} to {scale.high:g}")
    if len(tasks) > 8:
        lines.append(f"  and {len(tasks) - 8} more tasks")
    attempts = [
        (part.index.task[p], part.outcomes.by_episode[int(part.index.episode_index[p])]) for part, p in episodes
    ]
    return lines + one_sided((task, outcome.value) for task, outcome in attempts)

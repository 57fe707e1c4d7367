"""``regrasp annotate check``: a judge against known outcomes and spoilt attempts, before anyone trusts it."""

import asyncio
import csv
import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from regrasp.core.errors import ConfigError, OutcomeError, listing, nearest
from regrasp.core.outcome import Outcome
from regrasp.data.dataset import Dataset
from regrasp.data.storage import write_json_atomic
from regrasp.recap.annotate import (
    AnnotateResult,
    TerminalConfig,
    chosen_dataset,
    chosen_jobs,
    chosen_model,
    judge_jobs,
    look,
    make_bench,
    make_signal,
)
from regrasp.rewards import check
from regrasp.rewards.jobs import Control, Job
from regrasp.rewards.profiles import read_profile
from regrasp.rewards.rows import key_of, read_rows

_OTHER_TASKS = ("Fold the newspaper in half.", "Water the plant on the windowsill.")
"""Wrong instructions for attempts that all had one task."""
_CHANCE = 0.5


@dataclass(frozen=True, kw_only=True)
class CheckConfig(TerminalConfig):
    """Check a judge's terminal scores against known outcomes, and against spoilt copies of the successes."""

    labels: Path
    """A .csv file with id (or episode_index for a dataset), outcome and, where known, score from 1 to 5."""
    success_at: float = 4.0
    """The least score that counts as a success."""
    controls: bool = True
    """Also judge each success reversed, cut to a third, frozen, and with a wrong instruction."""
    report: Path | None = None
    """Also write the measures to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is known of an attempt."""

    success: bool
    score: int | None


def run(config: CheckConfig) -> AnnotateResult:
    """Judge the labelled attempts and say whether the judge can be used; 2 as exit code where it is not shown to be.

    Raises:
        ConfigError: A setting is out of range, or a tag is named: these rows are no annotations.
        OutcomeError: The labels cannot be understood.
    """
    if config.tag is not None:
        message = "--tag does not go with `annotate check`, whose rows hold spoilt attempts. Mend: give --output."
        raise ConfigError(message)
    if not 1 < config.success_at <= 5:
        message = f"--success-at is above 1 and at most 5; found {config.success_at:g}."
        raise ConfigError(message)
    profile = read_profile(config.profile)
    signal = make_signal(config, profile)
    dataset = chosen_dataset(config)
    jobs = chosen_jobs(config, dataset)
    truth = read_labels(config.labels, jobs, dataset, config.success_at)
    jobs = [job for job in jobs if job.id in truth]
    asked = jobs + (make_controls([job for job in jobs if truth[job.id].success]) if config.controls else [])
    if config.dry_run:
        return AnnotateResult(lines=look(config, signal, asked))
    if config.output is None:
        message = "Where are the rows to be kept? Mend: give --output FILE.jsonl."
        raise ConfigError(message)
    bench = make_bench(config, chosen_model(config), signal, profile)
    report = asyncio.run(judge_jobs(bench, asked, config.output))
    wanted = {(job.id, signal.name, bench.config, job.digest) for job in asked}
    rows = {row["id"]: row for row in read_rows(config.output) if key_of(row) in wanted}
    measures, reasons = assess(jobs, asked, rows, truth, config.success_at)
    if report.failed:
        reasons.append(f"{len(report.failed)} attempts could not be judged: {listing(report.failed)}")
    if config.report is not None:
        write_json_atomic(config.report, {"usable": not reasons, "reasons": reasons, **measures})
    lines = [f"{name}: {_shown(value)}" for name, value in measures.items()]
    verdict = "NOT shown to be usable: " + "; ".join(reasons) if reasons else "The judge is usable on these attempts."
    return AnnotateResult(lines=[*lines, verdict], exit_code=2 if reasons else 0)


def _shown(value: object) -> str:
    if isinstance(value, dict) and set(value) == {"value", "low", "high"}:
        known = {name: float("nan") if number is None else number for name, number in value.items()}
        return str(check.Interval(**known))
    if value is None:
        return "undefined"
    return f"{value:.3f}" if isinstance(value, float) else json.dumps(value)


def read_labels(path: Path, jobs: list[Job], dataset: Dataset | None, success_at: float) -> dict[str, Truth]:
    """Read what is known of the jobs.

    Args:
        path: A .csv file with id or episode_index, and outcome, score, or both.
        jobs: The jobs; those without a label are left out of the check.
        dataset: Their dataset, where episode_index names them.
        success_at: The least score of a success, where no outcome is given.

    Raises:
        OutcomeError: It is missing, names no job, or has a row that cannot be understood.
    """
    if not path.is_file():
        message = f"There is no labels file '{path}'. Mend: correct --labels."
        raise OutcomeError(message)
    known = [job.id for job in jobs]
    truth: dict[str, Truth] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        for row in reader:
            place = f"'{path}', line {reader.line_num}"
            name = row.get("id") or (f"{dataset.name}/{row.get('episode_index')}" if dataset is not None else "")
            if name not in known:
                message = f"{place}: {name!r} is none of the jobs.{nearest(name, known)} They are: {listing(known)}."
                raise OutcomeError(message)
            if name in truth:
                message = f"{place}: {name!r} is labelled twice. Mend: keep one row."
                raise OutcomeError(message)
            truth[name] = _truth(row, place, success_at)
    if not truth:
        message = f"'{path}' labels nothing. Mend: give the columns id (or episode_index) and outcome."
        raise OutcomeError(message)
    return truth


def _truth(row: dict[str, Any], place: str, success_at: float) -> Truth:
    said, outcome = row.get("score") or "", Outcome.parse(row.get("outcome"))
    if said and said.strip() not in {"1", "2", "3", "4", "5"}:
        message = f"{place}: 'score' is a whole number from 1 to 5; found {said!r}."
        raise OutcomeError(message)
    score = int(said) if said else None
    if outcome is Outcome.UNKNOWN and (row.get("outcome") or score is None):
        message = f"{place}: needs success or failure under 'outcome', or a score; found {row.get('outcome')!r}."
        raise OutcomeError(message)
    success = score is not None and score >= success_at if outcome is Outcome.UNKNOWN else outcome is Outcome.SUCCESS
    return Truth(success=success, score=score)


def make_controls(successes: list[Job]) -> list[Job]:
    """Return every success spoilt in each way; a judge that scores these alike looks at something else."""
    tasks = list(dict.fromkeys([*(job.task for job in successes), *_OTHER_TASKS]))
    spoilt = []
    for job in successes:
        for control in get_args(Control):
            task = job.task
            if control == "wrong instruction":
                task = tasks[(tasks.index(job.task) + 1) % len(tasks)]
            spoilt.append(replace(job, id=control_id(job, control), task=task, control=control))
    return spoilt


def control_id(job: Job, control: str) -> str:
    """The id of a job's spoilt copy."""
    return f"{job.id} ({control})"


def assess(
    jobs: list[Job], asked: list[Job], rows: dict[str, dict[str, Any]], truth: dict[str, Truth], success_at: float
) -> tuple[dict[str, Any], list[str]]:
    """Measure a judge.

    Args:
        jobs: The real attempts.
        asked: These and the spoilt ones.
        rows: The judge's rows, by id.
        truth: What is known of the real ones.
        success_at: The least score of a success.

    Returns:
        The measures by name, and the reasons why the judge is not shown to be usable: none where it is.
    """
    valid = {name: row for name, row in rows.items() if not row["invalid"]}
    judged = [job for job in jobs if job.id in valid]
    good = np.array([truth[job.id].success for job in judged], dtype=bool)
    progress = np.array([valid[job.id]["progress"] for job in judged], dtype=np.float64)
    area = check.bootstrap(check.auroc, progress, good)
    measures: dict[str, Any] = {
        "attempts": len(jobs),
        "successes": sum(truth[job.id].success for job in jobs),
        "invalid": sum(row["invalid"] for row in rows.values()),
        "auroc": dataclasses.asdict(area),
        **_scores(judged, valid, truth, good, success_at),
    }
    raw, mapped = check.held_out_calibration(progress, good)
    measures |= {"ece_held_out": _number(raw), "ece_held_out_after_isotonic": _number(mapped)}
    reasons = []
    if not area.low > _CHANCE:
        reasons.append(f"it does not tell successes from failures (AUROC {area})")
    if measures["invalid"] > 0.1 * max(len(rows), 1):
        reasons.append(f"{measures['invalid']} of {len(rows)} replies did not parse")
    for control in get_args(Control) if len(asked) > len(jobs) else ():
        pairs = [(job.id, control_id(job, control)) for job in judged if control_id(job, control) in valid]
        real, spoilt = (np.array([valid[pair[k]]["progress"] for pair in pairs], dtype=np.float64) for k in (0, 1))
        preferred = check.bootstrap(check.preference, real, spoilt)
        measures[f"preferred to {control}"] = dataclasses.asdict(preferred)
        if not preferred.low > _CHANCE:
            reasons.append(f"it does not score successes above the same ones {_words(control)} ({preferred})")
    return _finite(measures), reasons


def _words(control: str) -> str:
    return "under a wrong instruction" if control == "wrong instruction" else control


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _finite(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    """The value with None for what is undefined, which JSON can hold."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return _number(value) if isinstance(value, float) else value


def _scores(
    judged: list[Job], valid: dict[str, Any], truth: dict[str, Truth], good: np.ndarray, success_at: float
) -> dict[str, Any]:
    """What scores from 1 to 5 say, where the profile gives them; against true scores, where they are known."""
    scored = [job for job in judged if valid[job.id]["score"] is not None]
    if len(scored) < len(judged) or not judged:
        return {}
    scores = np.array([valid[job.id]["score"] for job in judged], dtype=np.int64)
    predicted = scores >= success_at
    counts = check.confusion(predicted, good)

    def accuracy(predicted: np.ndarray, good: np.ndarray) -> float:
        return float((predicted == good).mean())

    measures: dict[str, Any] = {"confusion": dataclasses.asdict(counts)}
    measures["accuracy"] = dataclasses.asdict(check.bootstrap(accuracy, predicted, good))
    true = [truth[job.id].score for job in judged]
    known = [score for score in true if score is not None]
    if len(known) == len(judged):
        right = np.array(known, dtype=np.int64)
        expected = np.array([valid[job.id]["expected_score"] for job in judged], dtype=np.float64)
        error = check.bootstrap(check.mean_absolute_error, scores.astype(np.float64), right.astype(np.float64))
        measures["mae"] = dataclasses.asdict(error)
        measures["quadratic_kappa"] = dataclasses.asdict(check.bootstrap(check.quadratic_kappa, scores, right))
        measures["tau_a"], measures["tau_b"] = check.kendall(expected, right.astype(np.float64))
    return measures

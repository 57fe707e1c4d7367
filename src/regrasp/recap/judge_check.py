"""``regrasp annotate check``: a judge against known outcomes and spoilt attempts, before anyone trusts it."""

import asyncio
import csv
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regrasp.core.errors import ConfigError, OutcomeError, listing, nearest
from regrasp.core.outcome import Outcome
from regrasp.data.dataset import Dataset
from regrasp.data.storage import write_bytes_atomic, write_json_atomic
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
from regrasp.recap.judge_measures import Assessment, Evidence, assess
from regrasp.rewards.jobs import CONTROLS, Control, Job, read_utf8
from regrasp.rewards.profiles import read_profile
from regrasp.rewards.rows import key_of, read_rows
from regrasp.rl.statistics import Interval

_OTHER_TASKS = ("Fold the newspaper in half.", "Water the plant on the windowsill.")
"""Wrong instructions for attempts that all had one task."""
_TRUNCATED = 1 / 3
"""The share of a success that its truncated copy shows."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig(TerminalConfig):
    """Check a judge's terminal scores against known outcomes, and against spoilt copies of the successes."""

    labels: Path
    """A .csv file with id (or episode_index for a dataset), outcome and, where known, score from 1 to 5."""
    success_at: float = 4.0
    """The least score that counts as a success."""
    controls: bool = True
    """Also judge each success reversed, cut to a third, frozen, and with a wrong instruction."""
    voc_points: int = 5
    """Also judge that many ever longer beginnings of each success, for how scores follow time (VOC); 0 for none."""
    report: Path | None = None
    """Also write the measures, and the calibration that was fitted, to this JSON file."""
    plot: Path | None = None
    """Also draw the reliability of the progress to this PNG file."""


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
    if config.voc_points < 0 or config.voc_points == 1:
        message = f"--voc-points is 2 or more, or 0 for none; found {config.voc_points}."
        raise ConfigError(message)
    profile = read_profile(config.profile)
    signal = make_signal(config, profile)
    dataset = chosen_dataset(config)
    jobs = chosen_jobs(config, dataset)
    truth = read_labels(config.labels, jobs, dataset, config.success_at)
    jobs = [job for job in jobs if job.id in truth]
    asked = [*jobs, *_changed([job for job in jobs if truth[job.id].success], config)]
    if config.dry_run:
        return look(config, signal, asked)
    if config.output is None:
        message = "Where are the rows to be kept? Mend: give --output FILE.jsonl."
        raise ConfigError(message)
    bench = make_bench(config, chosen_model(config), signal, profile)
    report = asyncio.run(judge_jobs(bench, asked, config.output))
    wanted = {(job.id, signal.name, bench.config, job.digest) for job in asked}
    rows = {row["id"]: row for row in read_rows(config.output) if key_of(row) in wanted}
    found = _assess(config, jobs, rows, truth)
    if report.failed:
        found.reasons.append(f"{len(report.failed)} attempts could not be judged: {listing(report.failed)}")
    return AnnotateResult(lines=_conclude(config, found), exit_code=2 if found.reasons else 0)


def _changed(successes: list[Job], config: CheckConfig) -> list[Job]:
    """The spoilt copies of successes, and their beginnings, as far as they are wanted."""
    controls = make_controls(successes) if config.controls else []
    directions = ("prefix", "reversed prefix") if config.controls else ("prefix",)
    return [*controls, *(part for way in directions for part in make_prefixes(successes, way, config.voc_points))]


def _assess(
    config: CheckConfig, jobs: list[Job], rows: dict[str, dict[str, Any]], truth: dict[str, Truth]
) -> Assessment:
    valid = {name: row for name, row in rows.items() if not row["invalid"]}

    def over_time(job: Job, way: Control, whole: str) -> list[float] | None:
        names = [*(part.id for part in make_prefixes([job], way, config.voc_points)), whole]
        known = config.voc_points and all(name in valid for name in names)
        return [valid[name]["progress"] for name in names] if known else None

    evidence = [
        Evidence(
            row=valid.get(job.id),
            success=truth[job.id].success,
            score=truth[job.id].score,
            spoilt={c: valid[control_id(job, c)] for c in CONTROLS if control_id(job, c) in valid},
            over_time=over_time(job, "prefix", job.id),
            over_reversed_time=over_time(job, "reversed prefix", control_id(job, "reversed")),
        )
        for job in jobs
    ]
    invalid = sum(row["invalid"] for row in rows.values())
    controls = CONTROLS if config.controls else ()
    return assess(evidence, config.success_at, controls, replies=len(rows), invalid=invalid)


def _conclude(config: CheckConfig, found: Assessment) -> list[str]:
    """Write the report and the plot, and say what was found."""
    lines = [f"{name}: {_shown(value)}" for name, value in found.measures.items()]
    if config.report is not None:
        fitted = found.held_out and found.held_out.calibration
        known = fitted and {"progress": fitted.progress.tolist(), "probability": fitted.probability.tolist()}
        said = {"usable": not found.reasons, "reasons": found.reasons, **found.measures, "calibration": known}
        write_json_atomic(config.report, said)
        lines.append(f"Wrote '{config.report}'")
    if config.plot is not None:
        lines.append(_draw(config.plot, found))
    reasons = "; ".join(found.reasons)
    return [*lines, f"NOT shown to be usable: {reasons}" if reasons else "The judge is usable on these attempts."]


def _draw(path: Path, found: Assessment) -> str:
    if found.held_out is None:
        return "No plot: a calibration needs two successes and two failures."
    from regrasp.report.judge_plots import draw_reliability

    write_bytes_atomic(path, draw_reliability(found.held_out))
    return f"Wrote '{path}'"


def _shown(value: object) -> str:
    if isinstance(value, dict) and set(value) == {"value", "low", "high"}:
        known = {name: float("nan") if number is None else number for name, number in value.items()}
        return str(Interval(**known))
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
    known = dict.fromkeys(job.id for job in jobs)
    truth: dict[str, Truth] = {}
    reader = csv.DictReader(io.StringIO(read_utf8(path), newline=""), skipinitialspace=True)
    try:
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
    except csv.Error as error:
        message = f"'{path}' is no CSV after line {reader.line_num} ({error}). Mend: correct it."
        raise OutcomeError(message) from None
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
        for control in CONTROLS:
            task = job.task
            if control == "wrong instruction":
                task = tasks[(tasks.index(job.task) + 1) % len(tasks)]
            shown = _TRUNCATED if control == "truncated" else 1.0
            spoilt.append(replace(job, id=control_id(job, control), task=task, control=control, shown=shown))
    return spoilt


def make_prefixes(successes: list[Job], way: Control, points: int) -> list[Job]:
    """Return the beginnings of every success, forwards or backwards, 1/points of it and more; not the whole."""
    return [
        replace(job, id=f"{job.id} ({way} {part}/{points})", control=way, shown=part / points)
        for job in successes
        for part in range(1, points)
    ]


def control_id(job: Job, control: str) -> str:
    """The id of a job's spoilt copy."""
    return f"{job.id} ({control})"

"""``regrasp annotate``: have a video reward model judge videos, jobs or a dataset's episodes."""

import asyncio
import contextlib
import math
import os
import shlex
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from regrasp.core.errors import ConfigError, SidecarError, VideoError, listing
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.data.storage import write_bytes_atomic
from regrasp.recap.episode_spans import parse_episodes
from regrasp.recap.selection import tell
from regrasp.report.progress import track
from regrasp.rewards.bench import Bench, LocalBench
from regrasp.rewards.dense import DenseSignal
from regrasp.rewards.engine import JudgeEngine, Usage
from regrasp.rewards.jobs import Job, episode_jobs, read_jobs, read_rubric, with_rubric
from regrasp.rewards.judging import Signal
from regrasp.rewards.pictures import preview, save_pictures
from regrasp.rewards.profiles import Profile, read_profile
from regrasp.rewards.rows import RowFile, read_rows
from regrasp.rewards.rubric import RubricSignal
from regrasp.rewards.run import RunReport, judge_on
from regrasp.rewards.terminal import TerminalSignal
from regrasp.rewards.views import Views

MODEL_VARIABLE = "REGRASP_JUDGE_MODEL"
_SHOWN = 3
"""Failed jobs whose reasons are told in full."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """What is judged, by which model; the base of the three signals' settings."""

    video: tuple[Path, ...] = ()
    """The videos of one attempt, one a camera: left right, left centre right, or top front left right."""
    task: str | None = None
    """The instruction of --video."""
    jobs: Path | None = None
    """JSON lines of jobs: id, task, videos."""
    dataset: Path | None = None
    """A LeRobot dataset, whose episodes are judged."""
    cameras: tuple[str, ...] = ()
    """The dataset's cameras, in the collage's order."""
    episodes: str | None = None
    """Which of the dataset's episodes, such as 0:20 or 3,5,8; all if not given."""
    tag: str | None = None
    """Keep the dataset's rows beside it, under this name."""
    sidecars: Path | None = None
    """Keep them in DIR/<dataset name>/ instead of the dataset's meta/ folder."""
    output: Path | None = None
    """The file of JSON lines to write; a run that was interrupted goes on from what it holds."""
    engine: str = "openai"
    """Who runs the model: openai (any compatible server), or in this process: transformers or vllm."""
    model: str | None = None
    """The model's name on the server, or its folder; REGRASP_JUDGE_MODEL if not given."""
    base_url: str | None = None
    """The server's address, such as http://localhost:8000/v1."""
    engine_options: tuple[str, ...] = ()
    """Further settings of the engine as name=value, such as tensor_parallel=2."""
    concurrency: int = 8
    """Calls that an engine has at once."""
    prices: tuple[float, float] | None = None
    """What a million tokens read and a million written cost; the run then says what it cost."""
    ray: str | None = None
    """Judge on the machines of a Ray cluster: HOST:PORT, auto for the one that runs here, or local to start one."""
    workers: int | None = None
    """How many engines run with --ray: one for each GPU, or for each machine, if not given."""
    profile: str = "generic"
    """The prompts: generic, roboreward, topreward, or the path of your own YAML file."""
    dry_run: bool = False
    """Read the videos and show what would be asked; load no model and write no rows."""
    save_prompt_images: Path | None = None
    """Write what the model sees into this folder."""
    overwrite: bool = False
    """Replace a tag's rows that were made with other settings."""
    config: Path | None = None
    """A recipe, whose section `annotate:` has settings; flags go before them."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class TerminalConfig(JudgeConfig):
    """Score attempts from 1 to 5 by how far they had come at the end."""

    with_rationale: bool = False
    """Have one line of reasons given before the score."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig(JudgeConfig):
    """Score every half second: 1 failure, 2 suboptimal, 3 normal."""

    frame_scores: bool = False
    """Also give a score for each frame."""


@dataclass(frozen=True, kw_only=True)
class RubricConfig(JudgeConfig):
    """Mark attempts by a rubric, step by step."""

    rubric: Path | None = None
    """A JSON file with rubric and, where wanted, robot and cameras, for --video and --dataset."""
    num_samples: int = 9
    """Answers drawn for each job; the middle one is reported."""
    keep_thinking: bool = False
    """Keep what the model thought in the rows."""
    moments: int = 0
    """Also mark the attempt cut off at that many moments, so that it is known about when points were earned."""


@dataclass(frozen=True, kw_only=True)
class AnnotateResult:
    """Lines for a person, and 2 as exit code where a job got no row."""

    lines: list[str] = field(default_factory=list)
    exit_code: int = 0


def run(config: JudgeConfig) -> AnnotateResult:
    """Judge every job that has no row yet, and keep each row as it comes.

    Raises:
        ConfigError: What is to be judged, or where rows go, was not said or cannot be understood.
        SidecarError: The tag holds rows that were made with other settings.
        EngineError: The engine cannot be used.
    """
    profile = read_profile(config.profile)
    signal = make_signal(config, profile)
    dataset = chosen_dataset(config)
    jobs = chosen_jobs(config, dataset)
    if isinstance(signal, RubricSignal):
        bare = next((job for job in jobs if not job.rubric), None)
        if bare is not None:
            message = f"Job {bare.id!r} has no rubric. Mend: give --rubric FILE.json, or jobs that hold one."
            raise ConfigError(message)
    if config.dry_run:
        return look(config, signal, jobs)
    path, copy = _destination(config, signal, dataset)
    model = chosen_model(config)
    if config.save_prompt_images is not None:
        _save(config.save_prompt_images, signal, jobs)
    bench = make_bench(config, model, signal, profile)
    again = dataset is not None and config.tag is not None and _is_other_judges(config, dataset, path, bench.config)
    report = asyncio.run(judge_jobs(bench, jobs, path, replace=again))
    if copy is not None and path.is_file():
        write_bytes_atomic(copy, path.read_bytes())
    return _result(config, report, path, dataset)


def chosen_model(config: JudgeConfig) -> str:
    """The model's name, of the flag or the environment.

    Raises:
        ConfigError: Neither names one.
    """
    model = config.model or os.environ.get(MODEL_VARIABLE)
    if not model:
        message = f"Which model judges? Mend: give --model NAME, or set {MODEL_VARIABLE}."
        raise ConfigError(message)
    return model


def make_signal(config: JudgeConfig, profile: Profile) -> Signal:
    """Set up the signal that a command's settings ask for."""
    match config:
        case TerminalConfig():
            ask = profile.ask("terminal")
            if config.with_rationale and ask.rationale_prefill is None:
                message = f"The profile {profile.name!r} has no `rationale_prefill`, which --with-rationale needs."
                raise ConfigError(message)
            return TerminalSignal(ask=ask, with_rationale=config.with_rationale)
        case DenseConfig():
            return DenseSignal(ask=profile.ask("dense"), frame_scores=config.frame_scores)
        case RubricConfig():
            if config.num_samples < 1:
                message = f"--num-samples is at least 1; found {config.num_samples}."
                raise ConfigError(message)
            if config.moments < 0:
                raise ConfigError(f"--moments is at least 0; found {config.moments}.")
            return RubricSignal(
                ask=profile.ask("rubric"),
                num_samples=config.num_samples,
                keep_thinking=config.keep_thinking,
                moments=config.moments,
            )
    raise AssertionError(type(config))


def make_engine(config: JudgeConfig, model: str) -> JudgeEngine:
    """Start the engine that the settings name."""
    from regrasp.rewards.engines import build_engine, engine_settings

    settings = engine_settings(model, config.base_url, config.engine_options)
    return build_engine(config.engine, settings, concurrency=config.concurrency)


def make_bench(config: JudgeConfig, model: str, signal: Signal, profile: Profile) -> Bench:
    """Set up who judges: an engine in this process, or workers of a Ray cluster.

    Raises:
        ConfigError: A setting is out of range, or a package is missing.
    """
    for flag, value in (("--concurrency", config.concurrency), ("--workers", config.workers)):
        if value is not None and value < 1:
            message = f"{flag} is at least 1; found {value}."
            raise ConfigError(message)
    if config.prices is not None and not all(0 <= price < math.inf for price in config.prices):
        message = f"--prices are two numbers of at least 0; found {config.prices[0]:g} {config.prices[1]:g}."
        raise ConfigError(message)
    from regrasp.rewards.engines import build_engine, engine_entry, engine_settings, judge_identity

    settings = engine_settings(model, config.base_url, config.engine_options)
    judge = judge_identity(config.engine, settings)
    if config.ray is None:
        if config.workers is not None:
            message = "--workers goes with --ray. Mend: give --ray local, or the address of a cluster."
            raise ConfigError(message)
        return LocalBench(signal, make_engine(config, model), profile, config.concurrency, judge=judge)
    from regrasp.rewards.ray_bench import RayBench

    entry, places = engine_entry(config.engine), {"workers": config.workers, "concurrency": config.concurrency}
    make = partial(build_engine, config.engine, settings, concurrency=config.concurrency)
    return RayBench(
        signal,
        profile,
        make,
        config.engine,
        model,
        address=config.ray,
        gpus=entry.gpus(settings),
        judge=judge,
        **places,
    )


def chosen_dataset(config: JudgeConfig) -> Dataset | None:
    """The dataset that is judged, or None for videos and jobs.

    Raises:
        ConfigError: Nothing or too much is to be judged, or a flag does not go with it.
    """
    given = [flag for flag, value in (("--video", config.video), ("--jobs", config.jobs)) if value]
    given += ["--dataset"] if config.dataset else []
    if len(given) != 1:
        message = f"What is judged is given by one of --video, --jobs and --dataset; found {listing(given) or 'none'}."
        raise ConfigError(message)
    astray = {
        "--task": config.task is not None and not config.video,
        "--cameras": bool(config.cameras) and not config.dataset,
        "--episodes": config.episodes is not None and not config.dataset,
        "--tag": config.tag is not None and not config.dataset,
        "--rubric": isinstance(config, RubricConfig) and config.rubric is not None and config.jobs is not None,
    }
    wrong = next((flag for flag, is_wrong in astray.items() if is_wrong), None)
    if wrong is not None:
        message = f"{wrong} does not go with {given[0]}. Mend: leave it out."
        raise ConfigError(message)
    return None if config.dataset is None else open_dataset(config.dataset, sidecars=config.sidecars)


def chosen_jobs(config: JudgeConfig, dataset: Dataset | None) -> list[Job]:
    """The jobs that the settings name."""
    rubric = isinstance(config, RubricConfig)
    if config.jobs is not None:
        return read_jobs(config.jobs, rubric=rubric)
    if dataset is not None:
        known = dataset.index().episode_index.tolist()
        jobs = episode_jobs(dataset, config.cameras, parse_episodes(config.episodes, known))
    elif not config.task or not config.task.strip():
        message = "What was the robot told? A judge needs it, and nothing is assumed. Mend: give --task TEXT."
        raise ConfigError(message)
    else:
        jobs = [Job(id=config.video[0].stem, task=config.task, videos=config.video)]
    if isinstance(config, RubricConfig) and config.rubric is not None:
        fields = read_rubric(config.rubric)
        jobs = [with_rubric(job, fields, f"'{config.rubric}'") for job in jobs]
    return jobs


def rows_path(dataset: Dataset, signal: str, tag: str) -> Path:
    """Where a dataset's rows of a tag are kept.

    Raises:
        ConfigError: The tag cannot be part of a file's name.
    """
    if not tag or "/" in tag or "\\" in tag or not tag.isprintable() or len(os.fsencode(tag)) > 200:
        message = f"--tag becomes part of a file's name; found {tag!r}. Mend: letters, digits, dashes."
        raise ConfigError(message)
    return dataset.sidecar_dir / f"{signal}_{tag}.jsonl"


def _destination(config: JudgeConfig, signal: Signal, dataset: Dataset | None) -> tuple[Path, Path | None]:
    """Where rows are appended, and where they are copied to at the end."""
    if dataset is not None and config.tag is not None:
        return rows_path(dataset, signal.name, config.tag), config.output
    if config.output is None:
        flags = "--output FILE.jsonl or --tag NAME" if dataset is not None else "--output FILE.jsonl"
        message = f"Where are the rows to be kept? Mend: give {flags}."
        raise ConfigError(message)
    return config.output, None


def _is_other_judges(config: JudgeConfig, dataset: Dataset, path: Path, digest: str) -> bool:
    """Whether a tag's rows are to be replaced: they are of one model, profile, rubric, camera order and settings.

    Raises:
        SidecarError: There are rows of others, and they are not to be replaced.
    """
    if not path.is_file():
        return False
    fingerprint = dataset.index().fingerprint
    asked = {job.id: job.digest for job in chosen_jobs(replace(config, episodes=None), dataset)}

    def is_other(row: dict[str, Any]) -> bool:
        current = (row.get("dataset") or {}).get("fingerprint") == fingerprint
        return row["config"] != digest or (current and row["job"] != asked.get(row["id"], row["job"]))

    other = next(filter(is_other, read_rows(path)), None)
    if other is not None and not config.overwrite:
        made = {name: other.get(name) for name in ("engine", "model", "profile")}
        made["cameras"] = listing((other.get("dataset") or {}).get("cameras", []))
        message = (
            f"'{path}' was written with other settings or another rubric, or by a model that has changed since "
            f"({', '.join(f'{name} {value}' for name, value in made.items())}). Mend: choose another --tag, or replace "
            "it with --overwrite."
        )
        raise SidecarError(message)
    return other is not None


def look(config: JudgeConfig, signal: Signal, jobs: list[Job]) -> AnnotateResult:
    """Say what would be asked, without asking, and which jobs cannot be judged."""
    lines, failed = [], {}
    for job in jobs:
        try:
            lines += preview(signal, job, config.save_prompt_images, with_prompt=not lines)
        except (VideoError, ConfigError) as error:
            failed[job.id] = str(error)
    _tell_failed(failed)
    lines.append(f"Would judge {len(jobs) - len(failed)} jobs; no model was loaded.")
    return AnnotateResult(lines=lines, exit_code=2 if failed else 0)


def _save(folder: Path, signal: Signal, jobs: list[Job]) -> None:
    for job in jobs:
        with contextlib.suppress(VideoError, ConfigError):  # told when it is to be judged
            save_pictures(folder, job, signal.first_request(job, Views(job)))


def _tell_failed(failed: dict[str, str]) -> None:
    for name, why in list(failed.items())[:_SHOWN]:
        tell(f"{name}: {why}")
    if len(failed) > _SHOWN:
        tell(f"and {len(failed) - _SHOWN} more; run the command again to try them again")


async def judge_jobs(bench: Bench, jobs: list[Job], path: Path, *, replace: bool = False) -> RunReport:
    """Have jobs judged, with progress shown, and their rows kept at ``path``; in place of what it holds, or after."""
    bar = track(range(len(jobs)), description=f"Judging ({bench.signal.name})", unit="jobs")
    next(bar)
    with RowFile(path, replace=replace) as rows:
        return await judge_on(bench, jobs, rows, on_done=lambda: next(bar, None))


def _spent(config: JudgeConfig, report: RunReport) -> list[str]:
    """What was asked of a server, trying it included, and what that cost at the prices given."""
    usage, lines = report.usage, []
    if usage is not None:
        said = f"{usage.requests} requests and {usage.retries} attempts repeated, trying the server included"
        lines.append(f"{said}: {usage.prompt_tokens} tokens read and {usage.completion_tokens} written")
    if config.prices is not None:
        usage = usage or Usage(prompt_tokens=report.prompt_tokens, completion_tokens=report.completion_tokens)
        lines.append(f"At {config.prices[0]:g} and {config.prices[1]:g} a million: {usage.spend(*config.prices):.4f}")
    return lines


def _result(config: JudgeConfig, report: RunReport, path: Path, dataset: Dataset | None) -> AnnotateResult:
    lines = [f"{report.judged} judged, {report.repeated} had been already, {len(report.failed)} without a row"]
    if report.judged:
        lines[0] += f"; {report.invalid} invalid, {report.flagged} flagged"
        waited = report.idle_s / max(report.wall_s, 1e-9)
        tokens = f"{report.prompt_tokens} tokens read and {report.completion_tokens} written"
        lines.append(f"{tokens} in {report.wall_s:.1f} s; no call was under way for {waited:.0%} of it")
    lines += _spent(config, report)
    _tell_failed(report.failed)
    if path.is_file():
        lines.append(f"Wrote '{path}'")
    if dataset is not None and config.tag is not None and isinstance(config, TerminalConfig) and path.is_file():
        rest = f"--from {shlex.quote(f'terminal:{config.tag}')} --success-at 4"
        words = ["--dataset", str(dataset.path), *(["--sidecars", str(config.sidecars)] if config.sidecars else [])]
        lines.append(f"Next: regrasp outcomes {shlex.join(words)} {rest}")
    return AnnotateResult(lines=lines, exit_code=2 if report.failed else 0)

"""``regrasp outcomes``: a judge's scores become outcomes, by a rule that the user states and the file records."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from regrasp.core.errors import ConfigError, MissingSidecar, SidecarError, listing, nearest
from regrasp.core.outcome import Outcome
from regrasp.core.provenance import Provenance, digest, today
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.data.sidecar import SidecarWriter, coded, existing_is_same, sidecar_path
from regrasp.data.storage import Transaction
from regrasp.recap.annotate import rows_path
from regrasp.recap.selection import StageResult, tell
from regrasp.rewards.rows import read_rows

_NO_EPISODE = -1


@dataclass(frozen=True, kw_only=True)
class OutcomesConfig:
    """Turn a judge's terminal scores into outcomes."""

    dataset: Path
    """The dataset that was judged."""
    scores: Annotated[str, tyro.conf.arg(name="from")]
    """Where the scores are: terminal:TAG, as `regrasp annotate terminal --dataset D --tag TAG` kept them."""
    success_at: float
    """The least score that counts as a success, above 1 and at most 5."""
    tag: str | None = None
    """The name of the outcomes: outcomes_TAG.parquet; the scores' own if not given."""
    sidecars: Path | None = None
    """Where the dataset's sidecars are, if not in its meta/ folder."""
    overwrite: bool = False
    """Replace outcomes of this tag that were made otherwise."""
    dry_run: bool = False
    """Say what would be written, and write nothing."""
    config: Path | None = None
    """A recipe, whose section `outcomes:` has settings; flags go before them."""
    debug: bool = False
    """Show the traceback of an error."""


def run(config: OutcomesConfig) -> StageResult:
    """Write ``outcomes_{tag}.parquet``: an outcome for every judged episode, UNKNOWN where the reply is invalid.

    Raises:
        ConfigError: The rule is none.
        MissingSidecar, SidecarError: There are no such scores, or they are of another version of the dataset.
    """
    signal, _, source_tag = config.scores.partition(":")
    if signal != "terminal" or not source_tag:
        message = f"--from is terminal:TAG, since outcomes are made from terminal scores; found {config.scores!r}."
        raise ConfigError(message)
    if not 1 < config.success_at <= 5:
        message = f"--success-at is above 1, which every score reaches, and at most 5; found {config.success_at:g}."
        raise ConfigError(message)
    dataset = open_dataset(config.dataset, sidecars=config.sidecars)
    rows = judged_episodes(dataset, signal, source_tag)
    outcomes = {number: _outcome(row, config.success_at, dataset) for number, row in sorted(rows.items())}
    tag = source_tag if config.tag is None else config.tag
    rows_path(dataset, signal, tag)  # a tag that cannot name a file is refused
    path = sidecar_path(dataset, "outcomes", tag)
    provenance = _provenance(config, dataset, rows, outcomes)
    lines = _summary(config, dataset, outcomes)
    if existing_is_same(path, provenance, overwrite=config.overwrite) and not config.dry_run:
        return StageResult(lines=[*lines, f"Already there, and the same: {path}"], written=[])
    if config.dry_run:
        return StageResult(lines=[*lines, f"Would write {path}"], written=[])
    with Transaction() as transaction:
        writer = SidecarWriter(transaction, path, "outcomes")
        texts = [outcome.value for outcome in Outcome]
        codes = np.array([texts.index(outcome.value) for outcome in outcomes.values()], dtype=np.int32)
        numbers = np.array(list(outcomes), dtype=np.int64)
        source = coded(np.zeros(len(numbers), dtype=np.int32), [config.scores])
        writer.write({"episode_index": numbers, "outcome": coded(codes, texts), "source": source})
        writer.close(provenance)
        transaction.commit(lambda: existing_is_same(path, provenance, overwrite=config.overwrite))
    words = ["--rollouts", str(config.dataset), *(["--sidecars", str(config.sidecars)] if config.sidecars else [])]
    following = f"regrasp returns {shlex.join([*words, '--outcomes-tag', tag, '--tag', tag])}"
    return StageResult(lines=[*lines, f"Wrote {path}", f"Next: {following}"], written=[path])


def judged_episodes(dataset: Dataset, signal: str, tag: str) -> dict[int, dict[str, Any]]:
    """Return a judge's row of each judged episode; rows of earlier versions of the dataset count for nothing.

    Raises:
        MissingSidecar: There are none of this tag; those that exist are named.
        SidecarError: An episode has a row of another version of the dataset only.
    """
    path = rows_path(dataset, signal, tag)
    make = f"regrasp annotate {signal} --dataset {shlex.quote(str(dataset.path))} --tag {shlex.quote(tag)} …"
    if not path.is_file():
        found = [p.stem.removeprefix(f"{signal}_") for p in sorted(dataset.sidecar_dir.glob(f"{signal}_*.jsonl"))]
        message = (
            f"'{dataset.path}' has no {signal} scores tagged {tag!r}. Found: {listing(found) or 'none'}."
            f"{nearest(tag, found)} Mend: {make}"
        )
        raise MissingSidecar(message)
    fingerprint = dataset.index().fingerprint
    rows: dict[int, dict[str, Any]] = {}
    outdated: dict[int, str] = {}
    for row in read_rows(path):
        place = row.get("dataset") or {}
        if row.get("control"):
            continue
        if place.get("fingerprint") == fingerprint:
            rows[int(place["episode_index"])] = row
        else:
            outdated[place.get("episode_index", _NO_EPISODE)] = row["id"]
    known = {*dataset.index().episode_index.tolist(), _NO_EPISODE}
    left = [name for number, name in sorted(outdated.items()) if number in known and number not in rows]
    if left:
        message = (
            f"'{path}' holds the judgement of {listing(left)}, made from another version of '{dataset.path}', and none "
            f"of this version. Mend: judge again: {make}"
        )
        raise SidecarError(message)
    if not rows:
        message = f"'{path}' holds no rows of this version of '{dataset.path}'. Mend: {make}"
        raise MissingSidecar(message)
    return rows


def _outcome(row: dict[str, Any], success_at: float, dataset: Dataset) -> Outcome:
    if row["invalid"]:
        return Outcome.UNKNOWN
    if row.get("score") is None:
        message = (
            f"The profile {row.get('profile')} gave '{dataset.path}' no scores from 1 to 5, which --success-at needs. "
            "Mend: judge with the profile generic or roboreward."
        )
        raise ConfigError(message)
    return Outcome.SUCCESS if row["score"] >= success_at else Outcome.FAILURE


def _provenance(
    config: OutcomesConfig, dataset: Dataset, rows: dict[int, dict[str, Any]], outcomes: dict[int, Outcome]
) -> Provenance:
    one = next(iter(rows.values()))
    judge = {name: one.get(name) for name in ("engine", "model", "profile", "profile_digest")}
    scores = {str(number): row.get("score") for number, row in sorted(rows.items())}
    counts = {kind.value: list(outcomes.values()).count(kind) for kind in Outcome}
    return Provenance(
        stage="outcomes",
        config={"from": config.scores, "success_at": config.success_at, "rule": "score >= success_at", **judge},
        fingerprint=dataset.index().fingerprint,
        inputs={"scores": digest(scores)},
        statistics=counts,
        notes={"excluded": sorted(set(dataset.index().episode_index.tolist()) - set(rows))},
        created=today(),
    )


def _summary(config: OutcomesConfig, dataset: Dataset, outcomes: dict[int, Outcome]) -> list[str]:
    counts = {kind: [n for n, outcome in outcomes.items() if outcome is kind] for kind in Outcome}
    if counts[Outcome.UNKNOWN]:
        tell(f"the judge's reply is invalid, so the outcome is unknown, of episodes {listing(counts[Outcome.UNKNOWN])}")
    missing = sorted(set(dataset.index().episode_index.tolist()) - set(outcomes))
    if missing:
        tell(f"{len(missing)} episodes of '{dataset.path}' were not judged, and get no outcome: {listing(missing)}")
    found = ", ".join(f"{len(numbers)} {kind.value}" for kind, numbers in counts.items() if numbers)
    return [f"{dataset.name}: {found} (a success is a score of at least {config.success_at:g} in {config.scores})"]

"""How each episode of a dataset ended, and where that was read. Nothing is guessed."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regrasp.core.errors import OutcomeError, listing
from regrasp.core.outcome import Outcome, Source
from regrasp.data.columns import open_parquet

if TYPE_CHECKING:
    from regrasp.data.dataset import Dataset

MEND = (
    "Mend: give them with --outcomes FILE.csv (columns episode_index, outcome and, for several datasets, dataset), "
    "or leave these episodes out with --unknown exclude"
)


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """The outcomes of one dataset.

    Attributes:
        by_episode: The outcome of every episode.
        read_from: Where each was read, in words; for an UNKNOWN one, why nothing could be.
        warnings: What a person should know, such as demonstrations whose own flag says failure.
    """

    by_episode: dict[int, Outcome]
    read_from: dict[int, str]
    warnings: list[str]

    def unknown(self) -> list[int]:
        """The episodes without an outcome."""
        return [number for number, outcome in self.by_episode.items() if outcome is Outcome.UNKNOWN]

    def count(self) -> dict[str, int]:
        """How many episodes ended in each way."""
        return {kind.value: sum(found is kind for found in self.by_episode.values()) for kind in Outcome}


def read_outcomes(dataset: "Dataset", given: dict[int, Outcome] | None = None, *, tag: str | None = None) -> Outcomes:
    """Read a dataset's outcomes, in this order: given, sidecar, ``episode_success``, ``next.success``, ``is_success``.

    Args:
        dataset: The dataset. A demonstration is a success, whatever it says.
        given: What the user named, by episode; goes before everything else.
        tag: The outcome sidecar to read where there are several.

    Raises:
        OutcomeError: ``given`` names an episode that is not there or calls a demonstration a failure, or there are
            several outcome sidecars and no tag.
    """
    index = dataset.index(flags=True)
    numbers = [int(number) for number in index.episode_index]
    given = given or {}
    _check_given(dataset, given, numbers)
    if dataset.source is Source.DEMO:
        contrary = [n for n, (outcome, _) in index.flags.items() if outcome is Outcome.FAILURE]
        text = f"{dataset.name}: {len(contrary)} demonstrations are flagged as failures ({index.flag_column}): {listing(contrary)}; they count as successes"
        return Outcomes(
            by_episode=dict.fromkeys(numbers, Outcome.SUCCESS),
            read_from=dict.fromkeys(numbers, "demonstration"),
            warnings=[text] if contrary else [],
        )
    sidecar, sidecar_name = _from_sidecar(dataset, tag)
    by_episode, read_from = {}, {}
    for number in numbers:
        if number in given:
            by_episode[number], read_from[number] = given[number], "--outcomes"
        elif number in sidecar:
            by_episode[number], read_from[number] = sidecar[number], sidecar_name
        else:
            by_episode[number], read_from[number] = _recorded(dataset, number)
    return Outcomes(by_episode=by_episode, read_from=read_from, warnings=[])


def _recorded(dataset: "Dataset", number: int) -> tuple[Outcome, str]:
    """What the dataset itself says of an episode."""
    row = dataset.meta.episodes.get(number)
    if row is not None and "episode_success" in row.fields:
        value = row.fields["episode_success"]
        outcome = Outcome.parse(value)
        reason = "episode_success" if outcome is not Outcome.UNKNOWN else f"episode_success is {value!r}"
        return outcome, reason
    missing = "no episode_success, next.success or is_success"
    return dataset.index(flags=True).flags.get(number, (Outcome.UNKNOWN, missing))


def _check_given(dataset: "Dataset", given: dict[int, Outcome], numbers: list[int]) -> None:
    strangers = sorted(set(given) - set(numbers))
    if strangers:
        message = f"--outcomes names episodes that '{dataset.name}' does not have: {listing(strangers)}. It has {listing(numbers)}."
        raise OutcomeError(message)
    failures = [number for number, outcome in given.items() if outcome is Outcome.FAILURE]
    if dataset.source is Source.DEMO and failures:
        message = (
            f"--outcomes calls episodes {listing(failures)} of '{dataset.name}' failures, but it was given as "
            "demonstrations, which are successes. Mend: give the dataset under --rollouts."
        )
        raise OutcomeError(message)


def _from_sidecar(dataset: "Dataset", tag: str | None) -> tuple[dict[int, Outcome], str]:
    found = sorted(dataset.sidecar_dir.glob("outcomes_*.parquet"))
    if tag is not None:
        path = dataset.sidecar_dir / f"outcomes_{tag}.parquet"
        if path not in found:
            message = f"'{dataset.name}' has no outcomes tagged {tag!r}. Found: {listing(p.name for p in found) or 'none'}."
            raise OutcomeError(message)
        found = [path]
    if len(found) > 1:
        message = (
            f"'{dataset.name}' has {len(found)} outcome sidecars ({listing(p.name for p in found)}). "
            "Mend: name one with --outcomes-tag."
        )
        raise OutcomeError(message)
    if not found:
        return {}, ""
    return {number: outcome for _, number, outcome in _rows(found[0])}, found[0].name


def read_outcome_file(path: Path, datasets: list[str]) -> dict[str, dict[int, Outcome]]:
    """Read ``--outcomes FILE``: a csv or parquet file with episode_index, outcome and, for several datasets, dataset.

    Args:
        path: The file.
        datasets: The names of the rollout datasets of the run.

    Returns:
        Outcomes by dataset and episode.

    Raises:
        OutcomeError: The file cannot be read, or says something that cannot be understood; the row is named.
    """
    outcomes: dict[str, dict[int, Outcome]] = {name: {} for name in datasets}
    for name, number, outcome in _rows(path):
        if name is None and len(datasets) != 1:
            message = f"'{path}' needs a column 'dataset', because the run has {len(datasets)} rollout datasets: {listing(datasets)}."
            raise OutcomeError(message)
        name = datasets[0] if name is None else name
        if name not in outcomes:
            message = f"'{path}' names the dataset {name!r}; the run's rollout datasets are: {listing(datasets)}."
            raise OutcomeError(message)
        if outcomes[name].get(number, outcome) is not outcome:
            message = f"'{path}' gives episode {number} of '{name}' two different outcomes."
            raise OutcomeError(message)
        outcomes[name][number] = outcome
    return outcomes


def _rows(path: Path) -> list[tuple[str | None, int, Outcome]]:
    if not path.is_file():
        message = f"There is no outcome file '{path}'."
        raise OutcomeError(message)
    if path.suffix == ".parquet":
        rows = open_parquet(path).read().to_pylist()
    else:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    parsed = []
    for line, row in enumerate(rows, 2):
        outcome = Outcome.parse(row.get("outcome"))
        try:
            number = int(row["episode_index"])
        except (KeyError, TypeError, ValueError):
            message = f"'{path}', row {line}: needs a whole number under 'episode_index'; found the columns {listing(row)} and the values {listing(row.values())}."
            raise OutcomeError(message) from None
        if outcome is Outcome.UNKNOWN and str(row.get("outcome")).strip().lower() != "unknown":
            message = f"'{path}', row {line}: needs success, failure or unknown under 'outcome'; found {row.get('outcome')!r}."
            raise OutcomeError(message)
        parsed.append((row.get("dataset") or None, number, outcome))
    return parsed

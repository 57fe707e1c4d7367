"""How each episode of a dataset ended, and where that was read. Nothing is guessed."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regrasp.core.errors import DatasetError, OutcomeError, listing
from regrasp.core.outcome import Outcome, Source
from regrasp.data.columns import read_table
from regrasp.data.sidecar import read_provenance

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
        flagged = f"{len(contrary)} demonstrations are flagged as failures ({index.flag_column}): {listing(contrary)}"
        text = f"{dataset.name}: {flagged}; they count as successes"
        return Outcomes(
            by_episode=dict.fromkeys(numbers, Outcome.SUCCESS),
            read_from=dict.fromkeys(numbers, "demonstration"),
            warnings=[text] if contrary else [],
        )
    sidecar, sidecar_name = _from_sidecar(dataset, numbers, tag)
    in_metadata = any("episode_success" in row.fields for row in dataset.meta.episodes.values())
    by_episode, read_from = {}, {}
    for number in numbers:
        if number in given:
            by_episode[number], read_from[number] = given[number], "--outcomes"
        elif number in sidecar:
            by_episode[number], read_from[number] = sidecar[number], sidecar_name
        else:
            by_episode[number], read_from[number] = _recorded(dataset, number, in_metadata=in_metadata)
    return Outcomes(by_episode=by_episode, read_from=read_from, warnings=[])


def _recorded(dataset: "Dataset", number: int, *, in_metadata: bool) -> tuple[Outcome, str]:
    """What the dataset itself says of an episode; a key that only other episodes have is a null, as in parquet."""
    row = dataset.meta.episodes.get(number)
    if row is not None and in_metadata:
        value = row.fields.get("episode_success")
        outcome = Outcome.parse(value)
        reason = "episode_success" if outcome is not Outcome.UNKNOWN else f"episode_success is {value!r}"
        return outcome, reason
    missing = "no episode_success, next.success or is_success"
    return dataset.index(flags=True).flags.get(number, (Outcome.UNKNOWN, missing))


def _check_given(dataset: "Dataset", given: dict[int, Outcome], numbers: list[int]) -> None:
    strangers = sorted(set(given) - set(numbers))
    if strangers:
        message = (
            f"--outcomes names episodes that '{dataset.name}' does not have: {listing(strangers)}. "
            f"It has {listing(numbers)}. Mend: correct the file."
        )
        raise OutcomeError(message)
    failures = [number for number, outcome in given.items() if outcome is Outcome.FAILURE]
    if dataset.source is Source.DEMO and failures:
        message = (
            f"--outcomes calls episodes {listing(failures)} of '{dataset.name}' failures, but it was given as "
            "demonstrations, which are successes. Mend: give the dataset under --rollouts."
        )
        raise OutcomeError(message)


def _from_sidecar(dataset: "Dataset", numbers: list[int], tag: str | None) -> tuple[dict[int, Outcome], str]:
    found = sorted(dataset.sidecar_dir.glob("outcomes_*.parquet"))
    if tag is not None:
        path = dataset.sidecar_dir / f"outcomes_{tag}.parquet"
        if path not in found:
            names = listing(p.name for p in found) or "none"
            message = f"'{dataset.name}' has no outcomes tagged {tag!r}. Found: {names}. Mend: name one of these."
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
    path = found[0]
    outcomes = read_outcome_file(path, [dataset.name])[dataset.name]
    provenance = read_provenance(path)
    strangers = sorted(set(outcomes) - set(numbers))
    if strangers or (provenance is not None and provenance.fingerprint != dataset.index().fingerprint):
        text = (
            f"it gives outcomes of episodes that are not there: {listing(strangers)}"
            if strangers
            else "its rows differ"
        )
        message = (
            f"'{path}' was made from another version of '{dataset.path}' ({text}). Mend: make it again, or remove it."
        )
        raise OutcomeError(message)
    return outcomes, path.name


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
            run = f"the run has {len(datasets)} rollout datasets: {listing(datasets)}"
            message = f"'{path}' needs a column 'dataset', because {run}. Mend: add it."
            raise OutcomeError(message)
        name = datasets[0] if name is None else name
        if name not in outcomes:
            known = f"the run's rollout datasets are: {listing(datasets)}"
            message = f"'{path}' names the dataset {name!r}; {known}. Mend: correct the file."
            raise OutcomeError(message)
        if outcomes[name].get(number, outcome) is not outcome:
            message = f"'{path}' gives episode {number} of '{name}' two different outcomes. Mend: keep one of them."
            raise OutcomeError(message)
        outcomes[name][number] = outcome
    return outcomes


def _rows(path: Path) -> list[tuple[str | None, int, Outcome]]:
    """The rows of an outcome file: dataset, episode and outcome."""
    parsed = []
    for place, row in _raw_rows(path):
        number = _episode_number(row.get("episode_index"))
        if number is None:
            found = f"the columns {listing(row)} and the values {listing(row.values())}"
            message = f"{place}: needs a whole number under 'episode_index'; found {found}. Mend: correct it."
            raise OutcomeError(message)
        said = row.get("outcome")
        outcome = Outcome.parse(said)
        if outcome is Outcome.UNKNOWN and str(said).strip().lower() != "unknown":
            message = f"{place}: needs success, failure or unknown under 'outcome'; found {said!r}. Mend: correct it."
            raise OutcomeError(message)
        parsed.append((row.get("dataset") or None, number, outcome))
    if not parsed:
        message = f"'{path}' has no rows. Mend: give the columns episode_index and outcome, and a row for each episode."
        raise OutcomeError(message)
    return parsed


def _raw_rows(path: Path) -> list[tuple[str, dict[str, object]]]:
    """Each row with the words for where it stands."""
    if not path.is_file():
        message = f"There is no outcome file '{path}'. Mend: correct the path."
        raise OutcomeError(message)
    try:
        if path.suffix == ".parquet":
            return [(f"'{path}', row {n}", row) for n, row in enumerate(read_table(path).to_pylist(), 1)]
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            return [(f"'{path}', line {reader.line_num}", dict(row)) for row in reader]
    except DatasetError as error:
        raise OutcomeError(str(error)) from error
    except (UnicodeDecodeError, csv.Error) as error:
        message = f"'{path}' cannot be read as csv ({error}). Mend: save it as UTF-8 text with commas, or as .parquet."
        raise OutcomeError(message) from None


def _episode_number(value: object) -> int | None:
    """The whole number that a cell holds, as text or as a number; None for anything else."""
    try:
        number = float(value) if isinstance(value, str | int | float) else float("nan")
    except ValueError:
        return None
    return int(number) if number.is_integer() else None

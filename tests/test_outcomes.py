"""How episodes ended: read in a fixed order, never guessed, and refused where a file cannot be understood."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrasp.core.errors import ConfigError, OutcomeError
from regrasp.core.outcome import Outcome, Source
from regrasp.core.provenance import Provenance
from regrasp.data.dataset import Dataset, open_dataset
from regrasp.data.outcomes import read_outcome_file, read_outcomes
from regrasp.data.sidecar import SidecarWriter, coded
from regrasp.data.storage import Transaction
from tests.datasets import EpisodeSpec, edit_parquet, write_dataset

SUCCESS, FAILURE, UNKNOWN = Outcome.SUCCESS, Outcome.FAILURE, Outcome.UNKNOWN
EPISODES = [EpisodeSpec(4), EpisodeSpec(3, success=False), EpisodeSpec(5, index=7)]


def opened(path: Path, *, source: Source = Source.ROLLOUT, **options: Any) -> Dataset:
    return open_dataset(write_dataset(path / "a", **{"episodes": EPISODES, **options}), source=source)


def outcomes_table(**rows: Any) -> pa.Table:
    return pa.table({"episode_index": [0, 1, 7], "outcome": ["success", "failure", "success"], **rows})


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        *[(value, SUCCESS) for value in (True, 1, 1.0, "success", " Success ", "TRUE", "1", "1.0")],
        *[(value, FAILURE) for value in (False, 0, 0.0, "failure", "Failure", "false", "0", "0.0")],
        *[(value, UNKNOWN) for value in (None, 2, 0.5, float("nan"), "", "maybe", "unknown", [True], [False], b"1")],
    ],
)
def test_what_stands_for_an_outcome(value: object, outcome: Outcome):
    assert Outcome.parse(value) is outcome


@pytest.mark.parametrize(
    ("word", "source"),
    [("demo", Source.DEMO), ("sft", Source.DEMO), (" SFT", Source.DEMO), ("rollout", Source.ROLLOUT)],
)
def test_what_stands_for_a_source(word: str, source: Source):
    assert Source.parse(word) is source


def test_a_source_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"found 'rolout'\. Did you mean 'rollout'\?"):
        Source.parse("rolout")


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
@pytest.mark.parametrize("column", ["next.success", "is_success", "episode_success"])
@pytest.mark.parametrize("kind", ["bool", "int"])
def test_outcomes_are_read_wherever_a_dataset_keeps_them(tmp_path: Path, layout: str, column: str, kind: str):
    dataset = opened(tmp_path, layout=layout, success_column=column, success_type=kind)
    found = read_outcomes(dataset)
    assert found.by_episode == {0: SUCCESS, 1: FAILURE, 7: SUCCESS}
    assert found.read_from == dict.fromkeys([0, 1, 7], column)
    assert found.count() == {"success": 2, "failure": 1, "unknown": 0}
    assert (found.unknown(), found.warnings) == ([], [])


def test_outcomes_of_the_metadata_may_be_words(tmp_path: Path):
    episodes = [EpisodeSpec(4), EpisodeSpec(3, success=False), EpisodeSpec(5, success=None)]
    dataset = opened(tmp_path, success_column="episode_success", success_type="string", episodes=episodes)
    found = read_outcomes(dataset)
    assert found.by_episode == {0: SUCCESS, 1: FAILURE, 2: UNKNOWN}
    assert found.read_from[2] == "episode_success is 'unknown'"
    assert found.unknown() == [2]


REASONS = [
    ("next.success", "null", "next.success is null"),
    ("is_success", "null", "is_success is null in the last frame"),
    ("is_success", "list", "is_success is not a true/false column"),
    ("next.success", "string", "next.success is not a true/false column"),
    ("episode_success", "list", "episode_success is [True]"),
    (None, "bool", "no episode_success, next.success or is_success"),
]


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
@pytest.mark.parametrize(("column", "kind", "reason"), REASONS)
def test_what_is_not_said_is_unknown_for_a_reason(
    tmp_path: Path, layout: str, column: str | None, kind: str, reason: str
):
    dataset = opened(tmp_path, layout=layout, success_column=column, success_type=kind)
    found = read_outcomes(dataset)
    assert set(found.by_episode.values()) == {UNKNOWN}
    assert found.read_from[0] == reason
    assert found.unknown() == [0, 1, 7]


@pytest.mark.parametrize("layout", ["v2.1", "v3.0"])
def test_an_episode_whose_success_is_null_in_the_metadata_is_unknown(tmp_path: Path, layout: str):
    episodes = [EpisodeSpec(4), EpisodeSpec(3, success=None)]
    dataset = opened(tmp_path, layout=layout, success_column="episode_success", episodes=episodes)
    assert read_outcomes(dataset).read_from == {0: "episode_success", 1: "episode_success is None"}


def test_an_episode_that_lacks_what_the_others_say_is_unknown_in_v21_as_in_v30(tmp_path: Path):
    # v3.0 stores such an episode with a null; v2.1 leaves the key out. Its own next.success is not asked in either.
    dataset = opened(tmp_path, layout="v2.1")
    file = dataset.path / "meta/episodes.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["episode_success"] = "failure"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = read_outcomes(open_dataset(dataset.path))
    assert found.by_episode == {0: FAILURE, 1: UNKNOWN, 7: UNKNOWN}
    assert found.read_from[1] == "episode_success is None"


def everything(tmp_path: Path) -> Dataset:
    """next.success says success, failure, success; is_success the opposite."""
    dataset = opened(tmp_path, episodes=EPISODES)

    def edit(table: pa.Table) -> pa.Table:
        return table.append_column("is_success", pa.array([n == 1 for n in table["episode_index"].to_pylist()]))

    edit_parquet(dataset.path / "data/chunk-000/file-000.parquet", edit)
    return dataset


def test_the_order_in_which_outcomes_are_believed(tmp_path: Path):
    dataset = everything(tmp_path)
    assert read_outcomes(dataset).by_episode == {0: SUCCESS, 1: FAILURE, 7: SUCCESS}
    metadata = dataset.path / "meta/episodes/chunk-000/file-000.parquet"
    edit_parquet(metadata, lambda t: t.append_column("episode_success", pa.array(["failure", "success", "failure"])))
    dataset = open_dataset(dataset.path)
    assert read_outcomes(dataset).by_episode == {0: FAILURE, 1: SUCCESS, 7: FAILURE}
    pq.write_table(outcomes_table().slice(0, 2), dataset.sidecar_dir / "outcomes_judge.parquet")
    found = read_outcomes(dataset, {1: UNKNOWN})
    assert found.by_episode == {0: SUCCESS, 1: UNKNOWN, 7: FAILURE}
    assert found.read_from == {0: "outcomes_judge.parquet", 1: "--outcomes", 7: "episode_success"}


@pytest.mark.parametrize("column", ["next.success", "is_success"])
def test_demonstrations_are_successes_whatever_they_say(tmp_path: Path, column: str):
    dataset = opened(tmp_path, source=Source.DEMO, success_column=column)
    pq.write_table(outcomes_table(outcome=["failure"] * 3), dataset.sidecar_dir / "outcomes_judge.parquet")
    found = read_outcomes(dataset)
    assert set(found.by_episode.values()) == {SUCCESS}
    assert set(found.read_from.values()) == {"demonstration"}
    said = f"a: 1 demonstrations are flagged as failures ({column}): 1; they count as successes"
    assert found.warnings == [said]


def test_demonstrations_without_a_flag_are_successes_without_a_warning(tmp_path: Path):
    found = read_outcomes(opened(tmp_path, source=Source.DEMO, success_column=None))
    assert (found.count()["success"], found.warnings) == (3, [])


def test_a_demonstration_cannot_be_called_a_failure(tmp_path: Path):
    dataset = opened(tmp_path, source=Source.DEMO)
    with pytest.raises(OutcomeError, match=r"calls episodes 7 of 'a' failures, .* Mend: give the dataset under --rol"):
        read_outcomes(dataset, {0: SUCCESS, 7: FAILURE})
    assert read_outcomes(dataset, {0: SUCCESS}).by_episode[0] is SUCCESS


def test_outcomes_of_episodes_that_are_not_there_are_refused(tmp_path: Path):
    with pytest.raises(OutcomeError, match=r"'a' does not have: 2, 9\. It has 0, 1, 7\. Mend: "):
        read_outcomes(opened(tmp_path), {0: SUCCESS, 9: SUCCESS, 2: FAILURE})


def test_one_of_several_outcome_sidecars_is_named_by_its_tag(tmp_path: Path):
    dataset = opened(tmp_path)
    for tag, outcomes in (("mine", ["failure"] * 3), ("judge", ["success"] * 3)):
        pq.write_table(outcomes_table(outcome=outcomes), dataset.sidecar_dir / f"outcomes_{tag}.parquet")
    with pytest.raises(
        OutcomeError, match=r"2 outcome sidecars \(outcomes_judge.parquet, outcomes_mine.parquet\)\. Mend"
    ):
        read_outcomes(dataset)
    assert set(read_outcomes(dataset, tag="mine").by_episode.values()) == {FAILURE}
    with pytest.raises(
        OutcomeError, match=r"no outcomes tagged 'yours'\. Found: outcomes_judge.parquet, outcomes_mine"
    ):
        read_outcomes(dataset, tag="yours")


def write_sidecar(dataset: Dataset, fingerprint: str) -> None:
    with Transaction() as transaction:
        writer = SidecarWriter(transaction, dataset.sidecar_dir / "outcomes_judge.parquet", "outcomes")
        words = coded(np.array([0, 0, 1]), ["failure", "success"])
        source = coded(np.zeros(3, dtype=np.int64), ["judge"])
        writer.write({"episode_index": np.array([0, 1, 7]), "outcome": words, "source": source})
        writer.close(Provenance(stage="annotate", config={}, fingerprint=fingerprint))
        transaction.commit()


def test_an_outcome_sidecar_of_this_dataset_is_read(tmp_path: Path):
    dataset = opened(tmp_path)
    write_sidecar(dataset, dataset.index().fingerprint)
    assert read_outcomes(dataset).by_episode == {0: FAILURE, 1: FAILURE, 7: SUCCESS}


def test_an_outcome_sidecar_of_another_version_of_the_dataset_is_refused(tmp_path: Path):
    dataset = opened(tmp_path)
    write_sidecar(dataset, "of an older version")
    with pytest.raises(
        OutcomeError, match=r"outcomes_judge.parquet' was made from another version of .* Mend: make it"
    ):
        read_outcomes(dataset)


def test_an_outcome_sidecar_with_episodes_that_are_not_there_is_refused(tmp_path: Path):
    dataset = opened(tmp_path)
    pq.write_table(outcomes_table(episode_index=[0, 1, 2]), dataset.sidecar_dir / "outcomes_judge.parquet")
    with pytest.raises(OutcomeError, match=r"another version .* outcomes of episodes that are not there: 2\)\. Mend: "):
        read_outcomes(dataset)


def from_csv(path: Path, text: str | bytes, datasets: list[str] | None = None) -> dict[str, dict[int, Outcome]]:
    file = path / "outcomes.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_outcome_file(file, datasets or ["a"])


@pytest.mark.parametrize(
    "text",
    [
        "episode_index,outcome\n0,success\n1,failure\n7,unknown\n",
        "\ufeffepisode_index,outcome\r\n0,true\r\n1,FALSE\r\n\r\n7,unknown",
        "note, episode_index, outcome\nx, 0, success\n, 1, 0\ny, 7, Unknown\n",
        "episode_index,outcome\n0.0,1.0\n1.0,0.0\n7.0,unknown\n",  # as pandas writes a column with gaps
        "episode_index,outcome,dataset\n0,success,a\n1,failure,\n7,unknown,a\n",
        "episode_index,outcome\n7,unknown\n1,failure\n0,success\n0,success\n",
    ],
)
def test_csv_files_are_read_as_people_write_them(tmp_path: Path, text: str):
    assert from_csv(tmp_path, text) == {"a": {0: SUCCESS, 1: FAILURE, 7: UNKNOWN}}


@pytest.mark.parametrize(
    "rows",
    [
        {"outcome": ["success", "failure", "unknown"]},
        {"episode_index": [0.0, 1.0, 7.0], "outcome": ["1", "0", "unknown"]},
        {"dataset": ["a", None, "a"], "outcome": pa.array(["success", "failure", "unknown"]).dictionary_encode()},
    ],
)
def test_parquet_files_are_read_too(tmp_path: Path, rows: dict[str, Any]):
    pq.write_table(outcomes_table(**rows), tmp_path / "o.parquet")
    assert read_outcome_file(tmp_path / "o.parquet", ["a"]) == {"a": {0: SUCCESS, 1: FAILURE, 7: UNKNOWN}}


def test_parquet_files_may_hold_booleans(tmp_path: Path):
    pq.write_table(outcomes_table(outcome=[True, False, True]), tmp_path / "o.parquet")
    assert read_outcome_file(tmp_path / "o.parquet", ["a"]) == {"a": {0: SUCCESS, 1: FAILURE, 7: SUCCESS}}


def test_one_file_serves_several_datasets(tmp_path: Path):
    text = "dataset,episode_index,outcome\na,0,success\nb,0,failure\n"
    assert from_csv(tmp_path, text, ["a", "b", "c"]) == {"a": {0: SUCCESS}, "b": {0: FAILURE}, "c": {}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no rows. Mend: give the columns episode_index and outcome"),
        ("episode_index,outcome\n", "has no rows"),
        (
            "episode,outcome\n0,success\n",
            "line 2: needs a whole number under 'episode_index'; found the columns episode,",
        ),
        ("episode_index;outcome\n0;success\n", "line 2: needs a whole number under 'episode_index'"),
        ("episode_index,outcome\n0,success\n\nfirst,success\n", "line 4: needs a whole number under 'episode_index'"),
        ("episode_index,outcome\n1.5,success\n", "line 2: needs a whole number"),
        ("episode_index,outcome\ninf,success\n", "line 2: needs a whole number"),
        ("episode_index,outcome\n,success\n", "line 2: needs a whole number"),
        ("episode_index,result\n0,success\n", "line 2: needs success, failure or unknown under 'outcome'; found None"),
        ("episode_index,outcome\n0,success\n1,maybe\n", "line 3: needs success, failure or unknown"),
        ("episode_index,outcome\n0\n", "line 2: needs success, failure or unknown"),
        ("episode_index,outcome\n0,success\n0,failure\n", "gives episode 0 of 'a' two different outcomes"),
        ("episode_index,outcome,dataset\n0,success,b\n", "names the dataset 'b'; the run's rollout datasets are: a"),
        (b"episode_index,outcome\n0,\xff\n", "cannot be read as csv ("),
        (b"episode_index,outcome\n0,a\0b\n", "needs success, failure or unknown"),
        ('episode_index,outcome\n0,"' + "x" * 200_000, "cannot be read as csv (field larger"),
    ],
)
def test_csv_files_that_cannot_be_understood_are_refused_by_their_line(tmp_path: Path, text: str | bytes, said: str):
    with pytest.raises(OutcomeError) as found:
        from_csv(tmp_path, text)
    assert said in str(found.value)
    assert str(found.value).startswith(f"'{tmp_path / 'outcomes.csv'}'")
    assert " Mend: " in str(found.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"episode_index": [0.5, 1.0, 7.0]}, "row 1: needs a whole number under 'episode_index'"),
        ({"episode_index": [0, None, 7]}, "row 2: needs a whole number under 'episode_index'"),
        ({"outcome": ["success", None, "failure"]}, "row 2: needs success, failure or unknown"),
        ({"outcome": [[True], [False], [True]]}, "row 1: needs success, failure or unknown"),
    ],
)
def test_parquet_files_that_cannot_be_understood_are_refused_by_their_row(
    tmp_path: Path, rows: dict[str, Any], said: str
):
    pq.write_table(outcomes_table(**rows), tmp_path / "o.parquet")
    with pytest.raises(OutcomeError, match=said):
        read_outcome_file(tmp_path / "o.parquet", ["a"])


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"PAR1 and no more", "cannot be read as parquet")])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "o.parquet").write_bytes(content)
    with pytest.raises(OutcomeError, match=said):
        read_outcome_file(tmp_path / "o.parquet", ["a"])


def test_an_outcome_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(OutcomeError, match=r"There is no outcome file '.*/none.csv'\. Mend: correct the path"):
        read_outcome_file(tmp_path / "none.csv", ["a"])


def test_several_datasets_need_a_column_that_tells_them_apart(tmp_path: Path):
    with pytest.raises(OutcomeError, match=r"needs a column 'dataset', because the run has 2 rollout datasets: a, b"):
        from_csv(tmp_path, "episode_index,outcome\n0,success\n", ["a", "b"])
